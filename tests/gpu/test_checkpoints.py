"""Files of weights on a real GPU: tiny checkpoints, and the default model's GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from tests.blocked import WITHOUT  # noqa: E402
from tests.checkpoints import make_checkpoint, oracle_logits  # noqa: E402
from tests.gpu.models import host_ops, smollm2_file  # noqa: E402

GAP = 1e-3
FAMILIES = ("llama", "gemma3", "gpt2", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Those that load each in its own way. Every family's logits are held to the CPU's in test_gpu.py, and those to
transformers' by the tests without a GPU."""
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, a small engine"]


@pytest.fixture(scope="module")
def smollm2() -> str:
    path = smollm2_file()
    if path is None:
        pytest.skip("SmolLM2's file is not in the cache of this machine (QUIRE_CACHE, see `quire pull`)")
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_gives_transformers_log_probabilities_and_tokens(tmp_path: Path, family: str) -> None:
    """Greedy; each token's two likeliest within the bound, up to the first place where two were as likely."""
    pytest.importorskip("transformers")
    from quire import LLM, SamplingParams

    oracle = make_checkpoint(tmp_path, family)
    prompts = [[5, 17, 33, 60, 2 + i, 71] * (1 + 3 * i) for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2, detokenize=False)
    with LLM(str(tmp_path), device="cuda", dtype="float32", skip_tokenizer_init=True, kv_cache_memory="32MiB",
             max_model_len=200) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        rows = oracle_logits(oracle, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        for row, token, entries in zip(rows, tokens, answer.logprobs, strict=True):
            best, second = row.topk(2).values.tolist()
            assert abs(entries[token].logprob - float(row[token])) < GAP
            if token != int(row.argmax()):
                assert best - second < GAP
                break


@torch.inference_mode()
def test_the_default_models_logits_are_within_a_thousandth_of_the_cpus(smollm2: str) -> None:
    from quire.models.build import build_decoder
    from quire.models.loader.source import resolve_model
    from quire.ops.triton import TritonOps
    from quire.worker.gpu.weights import build_on_device
    from tests.paged_driver import PagedDriver

    source, device = resolve_model(smollm2), torch.device("cuda")
    tokenizer = source.tokenizer()
    host = PagedDriver(build_decoder(source.config, source.weights(), host_ops(), max_model_len=256))
    ops = TritonOps(device, torch.float32)
    decoder = build_on_device(source.config, source.weights(), ops, device, torch.float32, 256)
    with torch.device(device):
        mine = PagedDriver(decoder)
    tokens: dict[int, Any] = {s: tokenizer.encode(text) for s, text in enumerate(PROMPTS)}
    for _ in range(3):
        want = host.step(tokens)
        with torch.device(device):
            got = mine.step(tokens)
        assert max(float((got[s].cpu() - want[s]).abs().max()) for s in tokens) < GAP
        tokens = {s: [int(want[s][-1].argmax())] for s in tokens}


def test_the_default_model_says_what_it_says_on_a_cpu(smollm2: str) -> None:
    from quire import LLM, SamplingParams
    from quire.ops.reference import TorchOps

    if isinstance(host_ops(), TorchOps):
        pytest.skip("the CPU's kernels are not built on this machine")
    params = SamplingParams(temperature=0.0, max_tokens=48, logprobs=2)
    found = []
    for options in ({"device": "cpu"}, {"device": "cuda", "dtype": "float32", "kv_cache_memory": "256MiB"}):
        with LLM(smollm2, max_model_len=512, max_num_seqs=8, **options) as llm:
            found.append([output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)])
    for cpu, gpu in zip(*found, strict=True):
        if list(cpu.token_ids) != list(gpu.token_ids):
            place = next(i for i, (a, b) in enumerate(zip(cpu.token_ids, gpu.token_ids, strict=False)) if a != b)
            top = sorted((entry.logprob for entry in cpu.logprobs[place].values()), reverse=True)
            assert top[0] - top[1] < GAP


CHAT = WITHOUT + """from quire import LLM, SamplingParams
with LLM(sys.argv[1], device="cuda", max_num_seqs=4, kv_cache_memory="256MiB", max_model_len=512) as llm:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    print(llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)[0].outputs[0].text)
"""


def test_a_chat_needs_no_package_but_those_of_the_offline_engine(smollm2: str) -> None:
    from tests.test_dependencies import OTHERS

    done = subprocess.run([sys.executable, "-c", CHAT, OTHERS, smollm2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Paris" in done.stdout


def test_the_command_line_generates_on_the_gpu(smollm2: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "generate", "--model", smollm2, "--device", "cuda", "--max-tokens", "8",
         "--temperature", "0", "--max-model-len", "512", "The capital of France is"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Paris" in done.stdout
