# Two commands do everything: `make demo` answers three prompts, `make test` proves the engine right.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml setup.py build_backend.py requirements/constraints.txt $(wildcard quire/kernels/cpu/*.[ch])

.PHONY: demo serve cluster test test-failed browser redis agents mooncake test-gpu lint bench fuzz clean help

help:
	@echo "make demo   set up everything and answer three prompts"
	@echo "make serve  OpenAI's and Anthropic's APIs on port 8000 of this machine"
	@echo "make cluster  a front, two prefill and two decode servers on this machine, and a prompt through them"
	@echo "make test   set up what tests need and run them all"
	@echo "make test-gpu  the suite of a GPU, where there is one"
	@echo "make browser  a Chromium for the tests of the page, where there is none"
	@echo "make mooncake  Mooncake's transfer engine for the tests, where there is none"
	@echo "make agents  the coding agents that the tests play sessions with (1.6 GB, from npm and PyPI)"
	@echo "make lint   ruff and mypy"
	@echo "make bench  cases A to D on the CPU, Quire against transformers in one run"
	@echo "make fuzz   differential fuzzer: random workloads against the plain path"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Quire needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no virtual environment could be made: apt-get install python3-venv"; exit 1; }

$(VENV)/.ready: $(BIN)/python $(SOURCES)
	$(PIP) install --progress-bar on -c requirements/constraints.txt -e .
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(PIP) install --progress-bar on -c requirements/constraints.txt -e '.[test,dev]'
	@touch $@

# xgrammar, for answers in a given form, brings packages that nothing else here needs.
$(VENV)/.ready-serve: $(VENV)/.ready
	$(PIP) install --progress-bar on -c requirements/constraints.txt -e '.[structured]'
	@touch $@

demo: $(VENV)/.ready
	@$(BIN)/quire demo

serve: $(VENV)/.ready-serve
	@$(BIN)/quire serve

cluster: $(VENV)/.ready-serve
	@$(BIN)/python -m quire.bench.routing.cluster

test: $(VENV)/.ready-test browser redis agents mooncake
	$(BIN)/python -m pytest -n auto --dist worksteal --durations 60 || { test $$? -eq 1 && $(MAKE) --no-print-directory test-failed; }

# Tests that failed beside others are run once more by themselves. A test that passes only now is named: it depends on
# what else the machine does, and is to be mended.
test-failed:
	@echo "Some tests failed. Once more, one at a time:"
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -rp
	@echo "The tests named above passed only when they ran by themselves: they depend on what else the machine does."

# Without one, the tests of the page are skipped and say so.
browser: $(VENV)/.ready-test
	@command -v chromium || command -v chromium-browser || command -v google-chrome \
	  || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } > /dev/null 2>&1 \
	  || timeout 300 $(BIN)/playwright install chromium > /dev/null 2>&1 \
	  || echo "no Chromium could be had: the tests of the page will be skipped"

# Without it, the tests of an index in Redis are skipped and say so.
redis:
	@command -v redis-server \
	  || { apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server; } > /dev/null 2>&1 \
	  || echo "no redis-server could be had: the tests of an index in Redis will be skipped"

# Without it, the tests of KV through Mooncake are skipped and say so. Its library needs some of the system's.
MOONCAKE := mooncake-transfer-engine-non-cuda
MOONCAKE_LIBRARIES := libibverbs1 libnuma1 librdmacm1 libcurl4
mooncake: $(VENV)/.ready-test
	@$(BIN)/python -c 'import mooncake.engine' 2> /dev/null || { \
	  $(PIP) install -q -c requirements/constraints.txt $(MOONCAKE) > /dev/null 2>&1; \
	  $(BIN)/python -c 'import mooncake.engine' 2> /dev/null \
	    || { apt-get update -qq && apt-get install -qq -y --no-install-recommends $(MOONCAKE_LIBRARIES); } > /dev/null 2>&1; \
	  $(BIN)/python -c 'import mooncake.engine' 2> /dev/null \
	    || echo "Mooncake's transfer engine could not be installed: the tests with it will be skipped"; }

# Kept in the user's cache folder, so that they are fetched once for a machine; at most three minutes are spent on it.
# Without them, the sessions with agents are skipped and say so. OpenCode has a folder of its own, since the step after its
# installation fails on some machines and would take the others with it.
AGENTS := $(or $(QUIRE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/quire)/agents
CODEX := 0.166.0
CLAUDE := 2.1.197
OPENCODE := 1.18.33
AIDER := 0.86.2
# Is a package of npm there, in this version? A changed pin installs the new one over the old.
has = { test -x $(AGENTS)/$(1)/.bin/$(2) && grep -qs '"version": "$(4)"' $(AGENTS)/$(1)/$(3)/package.json; }
NPM_INSTALL := npm install --silent --no-audit --no-fund --fetch-retries=1
agents:
	-@mkdir -p $(AGENTS)
	@{ $(call has,node_modules,codex,@openai/codex,$(CODEX)) \
	  && $(call has,node_modules,claude,@anthropic-ai/claude-code,$(CLAUDE)); } || { \
	  timeout 170 $(NPM_INSTALL) --prefix $(AGENTS) @openai/codex@$(CODEX) @anthropic-ai/claude-code@$(CLAUDE) \
	    > $(AGENTS)/npm.log 2>&1 \
	  || echo "codex and claude-code could not be installed: the sessions with them will be skipped"; } & \
	$(call has,opencode/node_modules,opencode,opencode-ai,$(OPENCODE)) || { \
	  { timeout 130 $(NPM_INSTALL) --ignore-scripts --prefix $(AGENTS)/opencode opencode-ai@$(OPENCODE) \
	    && timeout 40 node $(AGENTS)/opencode/node_modules/opencode-ai/postinstall.mjs; } > $(AGENTS)/opencode.log 2>&1 \
	  || { rm -rf $(AGENTS)/opencode; echo "opencode could not be installed: the session with it will be skipped"; }; } & \
	ls -d $(AGENTS)/aider/lib/python*/site-packages/aider_chat-$(AIDER).dist-info > /dev/null 2>&1 || { \
	  $(PYTHON) -m venv $(AGENTS)/aider && timeout 170 $(AGENTS)/aider/bin/python -m pip install --quiet --no-compile \
	    --disable-pip-version-check aider-chat==$(AIDER) > $(AGENTS)/aider.log 2>&1 \
	  || echo "aider could not be installed: the session with it will be skipped"; }; wait

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/mypy quire

bench: $(VENV)/.ready-test
	$(BIN)/quire bench cpu
	$(BIN)/quire bench scheduler

fuzz: $(VENV)/.ready-test
	$(BIN)/quire fuzz

clean:
	rm -rf $(VENV) build quire.egg-info quire/kernels/cpu/*.so

# Uses the environment's own python where it has torch with CUDA (TEST_PYTHON=python3), since that of make test may not.
TEST_PYTHON ?= $(BIN)/python
# TIMES=FILE: when each test ended and how long it took, written as it ends.
# Tests that run compiled kernels where there is a GPU; the others of tests/kernels/triton never do, and are part of make test.
COMPILED_KERNELS := kernels experts latent sample rank_parts rank_scales bits meeting codes_few features
test-gpu: $(if $(filter $(BIN)/python,$(TEST_PYTHON)),$(VENV)/.ready-test)
	@if $(TEST_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(TEST_PYTHON) -m quire.kernels.cpu.build && \
	  $(TEST_PYTHON) tests/parallel.py -n 14 $(if $(TIMES),--times $(TIMES)) --alone tests/gpu/test_waiting.py --alone tests/gpu/test_memory.py \
	    --alone tests/gpu/test_rank_memory.py tests/gpu/test_kernels.py tests/gpu/test_ranks.py tests/gpu/test_checkpoints.py \
	    tests/gpu/test_speculation.py tests/gpu/test_gpu.py tests/gpu \
	    $(foreach part,$(COMPILED_KERNELS),tests/kernels/triton/test_$(part).py) tests/sampling/test_sampler_gpu.py; \
	else echo "no CUDA GPU that torch can use on this machine: the GPU suite was not run"; fi
