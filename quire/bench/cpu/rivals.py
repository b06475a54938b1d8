"""Other engines of integer weights on a CPU, for `quire bench cpu --rivals`: onnxruntime-genai and llama.cpp.

Both come from the package index (`pip install quire[bench]`) and are imported here only.
Each computes the same model: its file is made once, from the weights that Quire reads, and kept in the cache folder.
How each is used:

- onnxruntime-genai: 4 bits in groups of 32, int8 activations (accuracy level 4). Requests one after the other; a prefix
  that all requests share is computed once, and the generator goes back to its end for each. Static batches were not
  tried.
- llama.cpp: Q4_0, which was faster than the file's own Q4_1. All requests in one context: prompts in batches of 2,048
  tokens, then every step with all sequences. A shared prefix is computed once, and its cells serve all sequences;
  without one each sequence has cells of its own. Of the two kinds of cells the faster was taken for each case.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.cpu.cases import Workload
from quire.child import module_command
from quire.errors import QuireError
from quire.machine import usable_cores
from quire.models.loader.pull import model_folder
from quire.models.loader.source import resolve_model

Runner = Callable[[Workload], list[list[int]]]
"""Generates a workload's tokens once."""
_LEAST_SHARED = 16
_BATCH = 2048


def make_files(rival: str, model: str) -> None:
    """The rival's own file of a model, where it is not there yet; in a process of its own, since it takes memory."""
    if rival == "onnxruntime-genai" and not (_folder(model) / "int4" / "genai_config.json").exists():
        _run(module_command("quire.bench.cpu.rivals", rival, model))
        _run([sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(_folder(model) / "floats"),
              "-o", str(_folder(model) / "int4"), "-p", "int4", "-e", "cpu", "-c", str(_folder(model) / "cache"),
              "--extra_options", "accuracy_level=4", "block_size=32"])
    if rival == "llama.cpp" and not (_folder(model) / "q4_0.gguf").exists():
        _run(module_command("quire.bench.cpu.rivals", rival, model))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise QuireError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


def _folder(model: str) -> Path:
    return model_folder(model.replace("/", "_")) / "bench"


def shared_prefix(work: Workload) -> int:
    """Tokens that all prompts begin with; 0 where they are few."""
    columns = enumerate(zip(*work.prompts, strict=False))
    count = next((at for at, tokens in columns if len(set(tokens)) > 1), 0) if len(work.prompts) > 1 else 0
    return count if count >= _LEAST_SHARED else 0


# ---- onnxruntime-genai


def _export_floats(model: str) -> None:
    """A folder as transformers writes it, with a tokenizer that nobody uses: the converter wants one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from quire.eval.transformers_model import load_in_transformers

    network, vocab_size = load_in_transformers(model)
    network.save_pretrained(_folder(model) / "floats")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2")
    tokenizer.save_pretrained(_folder(model) / "floats")


def onnxruntime_runner(model: str) -> Runner:
    import onnxruntime_genai as og

    network = og.Model(og.Config(str(_folder(model) / "int4")))

    def generator(length: int) -> Any:
        params = og.GeneratorParams(network)
        params.set_search_options(do_sample=False, max_length=length, min_length=length)
        return og.Generator(network, params)

    def run(work: Workload) -> list[list[int]]:
        shared, found = shared_prefix(work), []
        longest = max(len(prompt) + count for prompt, count in zip(work.prompts, work.outputs, strict=True))
        stream = generator(longest)
        if shared:
            stream.append_tokens(np.array(work.prompts[0][:shared], np.int32))
        for prompt, count in zip(work.prompts, work.outputs, strict=True):
            if shared:
                stream.rewind_to(shared)
            else:
                stream = generator(len(prompt) + count)
            stream.append_tokens(np.array(prompt[shared:], np.int32))
            for _ in range(count):
                stream.generate_next_token()
            found.append([int(token) for token in stream.get_sequence(0)[len(prompt) :]])
        return found

    return run


# ---- llama.cpp


def _quantize(model: str) -> None:
    import llama_cpp

    source = resolve_model(model, progress=False).path
    if source.suffix != ".gguf":
        raise QuireError(f"llama.cpp is measured on GGUF files, and {model} is {source}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    target = _folder(model) / "q4_0.gguf"
    target.parent.mkdir(parents=True, exist_ok=True)
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise QuireError(f"llama.cpp could not make {target}")


class _LlamaBatch:
    """Tokens on their way into llama.cpp, and the next token of those sequences that want one."""

    def __init__(self, library: Any, context: Any, vocab_size: int) -> None:
        self._library, self._context, self._vocab_size = library, context, vocab_size
        self._batch = library.llama_batch_init(_BATCH, 0, 1)
        self._batch.n_tokens = 0
        self._wanted: list[tuple[int, int]] = []
        self.next: dict[int, int] = {}

    def add(self, token: int, position: int, sequence: int, wanted: bool) -> None:
        if self._batch.n_tokens == _BATCH:
            self.flush()
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, position, 1, wanted
        batch.seq_id[at][0] = sequence
        if wanted:
            self._wanted.append((sequence, at))
        batch.n_tokens = at + 1

    def flush(self) -> None:
        if self._batch.n_tokens and self._library.llama_decode(self._context, self._batch):
            raise QuireError("llama.cpp could not compute a batch")
        for sequence, at in self._wanted:
            logits = self._library.llama_get_logits_ith(self._context, at)
            self.next[sequence] = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        self._wanted, self._batch.n_tokens = [], 0


def llama_runner(model: str, work: Workload, vocab_size: int) -> Runner:
    """With room for this workload."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    path = str(_folder(model) / "q4_0.gguf").encode()
    network = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    lengths = [len(prompt) + count for prompt, count in zip(work.prompts, work.outputs, strict=True)]
    params.kv_unified = shared_prefix(work) > 0
    params.n_ctx = 64 + (sum(lengths) if params.kv_unified else (max(lengths) + 64) * len(lengths))
    params.n_seq_max, params.n_batch = len(lengths), _BATCH
    params.n_threads = params.n_threads_batch = usable_cores()
    context = llama_cpp.llama_init_from_model(network, params)
    memory = llama_cpp.llama_get_memory(context)

    def prefill(work: Workload, batch: _LlamaBatch) -> None:
        shared = shared_prefix(work)
        for position, token in enumerate(work.prompts[0][:shared]):
            batch.add(token, position, 0, False)
        batch.flush()
        for sequence in range(1, len(work.prompts) if shared else 0):
            llama_cpp.llama_memory_seq_cp(memory, 0, sequence, 0, shared)
        for sequence, prompt in enumerate(work.prompts):
            for position in range(shared, len(prompt)):
                batch.add(prompt[position], position, sequence, position == len(prompt) - 1)
        batch.flush()

    def run(work: Workload) -> list[list[int]]:
        _keep = quiet  # llama.cpp calls it as long as it lives
        llama_cpp.llama_memory_clear(memory, True)
        batch = _LlamaBatch(llama_cpp, context, vocab_size)
        prefill(work, batch)
        found: list[list[int]] = [[] for _ in work.prompts]
        while batch.next:
            step, batch.next = batch.next, {}
            for sequence, token in step.items():
                found[sequence].append(token)
                if len(found[sequence]) < work.outputs[sequence]:
                    batch.add(token, len(work.prompts[sequence]) + len(found[sequence]) - 1, sequence, True)
                else:
                    llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
            batch.flush()
        return found

    return run


if __name__ == "__main__":
    {"onnxruntime-genai": _export_floats, "llama.cpp": _quantize}[sys.argv[1]](sys.argv[2])
