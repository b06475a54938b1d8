"""The contract for the integers of a GGUF file: whatever its format, a token's bits do not depend on the path to them,
and weights take hardly more memory than in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from quire import LLM, SamplingParams
from quire.bench.cpu.cpu_decoder import cpu_decoder
from tests.models.loader.tiny_gguf import tiny_model, write_gguf
from tests.test_same_tokens import PROMPTS, assert_same, run

FORMATS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 128}
FEW = PROMPTS[:5]


def written(folder: Path, quant: str, tied: bool) -> Path:
    return write_gguf(folder / "model.gguf", "llama", tiny_model("llama", **SIZES, tie_word_embeddings=tied), quant)


@pytest.mark.parametrize("quant", FORMATS)
def test_paths_change_no_bit(tmp_path: Path, quant: str) -> None:
    path = written(tmp_path, quant, tied=quant.endswith("0"))
    plain = run(path, FEW, one_by_one=True, enable_prefix_caching=False, enable_chunked_prefill=False)
    tight: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 24, "max_num_seqs": 5}
    for options in (
        {"num_threads": 1},
        {"max_num_batched_tokens": 7, "block_size": 3},
        {**tight, "swap_space": 0.01, "preemption_mode": "swap"},
    ):
        assert_same(run(path, FEW, **options), plain)
    assert run(path, FEW, one_by_one=True, dtype="float32")[0] != plain[0]


@pytest.mark.parametrize("quant", ["Q4_1", "Q4_K", "Q6_K"])
def test_ranks_change_no_bit(tmp_path: Path, quant: str) -> None:
    """Ranks cut the blocks of 256 columns of a K-quant: their scales are then stored in another way."""
    path = written(tmp_path, quant, tied=False)
    asked = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, ignore_eos=True)
    found = []
    for ranks in (1, 2, 3):
        options: dict[str, Any] = {"distributed_executor_backend": "threads"} if ranks > 1 else {}
        with LLM(str(path), skip_tokenizer_init=True, tensor_parallel_size=ranks, num_threads=1, **options) as llm:
            outputs = llm.generate(FEW[:3], asked, use_tqdm=False)
        found.append([(each.token_ids, each.logprobs) for output in outputs for each in output.outputs])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("quant", FORMATS)
def test_weights_take_the_memory_of_the_file(tmp_path: Path, quant: str) -> None:
    """Scales of K-quants have six bits each there and eight here; a panel is filled up to 64 bytes."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]]
    decoder = cpu_decoder(str(written(tmp_path, quant, tied=True)), 64, 1, quantization="file")
    layer = decoder.layers[0]
    for linear in (layer.attn.qkv, layer.attn.out, layer.mlp.up, layer.mlp.down, decoder.head):
        packed: Any = linear.packed
        stored = packed.in_features * packed.out_features * nbytes / elements
        assert packed.format == f"int{quant[1]}"
        assert stored <= packed.nbytes < 1.04 * stored + 512
