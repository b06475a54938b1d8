"""The contract in integers: with `quantization` too a token's bits do not depend on the path to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.bench.cpu.accuracy import decoder_of
from quire.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.integer_checkpoints import AWQ, awq, write_checkpoint
from tests.test_same_tokens import PROMPTS, assert_same, run

KINDS: list[dict[str, Any]] = [
    {"quantization": "int4"},
    {"quantization": "int8", "quantization_group_size": 0, "quantization_zero_points": True},
]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("integers")
    make_checkpoint(folder, "llama", **SIZES)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_batches_chunks_blocks_and_threads_change_no_bit(checkpoint: Path, kind: dict[str, Any]) -> None:
    prompts = PROMPTS[:5]
    plain = run(
        checkpoint, prompts, one_by_one=True, enable_prefix_caching=False, enable_chunked_prefill=False, **kind
    )
    for options in (
        {},
        {"max_num_batched_tokens": 33, "block_size": 3},
        {"block_size": 4, "num_kv_blocks": 24, "max_num_seqs": 8, "num_threads": 1},
    ):
        found = run(checkpoint, prompts, **options, **kind)
        assert_same(found, plain)


@pytest.mark.parametrize(("kind", "columns"), [
    *[(kind, 352) for kind in KINDS],
    ({"quantization": "int4", "quantization_group_size": 128, "quantization_zero_points": False,
      "kv_cache_dtype": "int8"}, 352),
    ({"quantization": "int8"}, 272)])
def test_ranks_and_stages_change_no_bit(tmp_path: Path, kind: dict[str, Any], columns: int) -> None:
    """Weights that are rounded at load are cut at slices of the sum, so that every rank rounds the same groups; one of
    272 columns is rounded on no rank, though most have a part of it that would do."""
    make_checkpoint(tmp_path, "llama", **{**SIZES, "intermediate_size": columns})
    asked = [SamplingParams(seed=i, max_tokens=6, temperature=1.0, logprobs=3, ignore_eos=True) for i in range(4)]
    found = []
    for tensor, stages in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
        shared: dict[str, Any] = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "num_threads": 1}
        if tensor * stages > 1:
            shared["distributed_executor_backend"] = "threads"
        with LLM(str(tmp_path), skip_tokenizer_init=True, **shared, **kind) as llm:
            outputs = llm.generate(PROMPTS[:4], asked, use_tqdm=False)
        found.append([(each.token_ids, each.logprobs) for output in outputs for each in output.outputs])
    assert all(other == found[0] for other in found[1:])


def test_keys_and_values_that_many_query_heads_read_are_rounded_to_eight_bits(tmp_path: Path) -> None:
    for kv_heads, formats in ((1, "int5 + int8"), (2, "int5")):
        folder = tmp_path / str(kv_heads)
        make_checkpoint(folder, "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=kv_heads)
        attention = decoder_of("int4", str(folder), 64, 1).layers[0].attn
        assert (attention.qkv.packed.format, attention.out.packed.format) == (formats, "int8")


def test_integers_are_what_is_multiplied(checkpoint: Path) -> None:
    """Tokens that differ from those of floats: the option is not ignored."""
    floats, eight, four = (
        run(checkpoint, PROMPTS[:2], quantization=kind) for kind in (None, "int8", "int4")
    )
    assert floats[0] != eight[0] != four[0] != floats[0]
    assert floats[0] == run(checkpoint, PROMPTS[:2], quantization="file")[0], "this file has no integers"


def test_integers_of_the_file_are_multiplied_as_such_unless_floats_are_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, awq(), AWQ)
    by_default, as_stored, floats = (
        run(tmp_path, PROMPTS[:2], **options) for options in ({}, {"quantization": "file"}, {"dtype": "float32"})
    )
    assert_same(by_default, as_stored)
    assert floats[0] != by_default[0]


def test_what_makes_no_sense_is_refused() -> None:
    for options, field in (
        ({"quantization": "int3"}, "quantization"),
        ({"quantization": "int4", "quantization_group_size": 48}, "quantization_group_size"),
        ({"quantization_group_size": 64}, "quantization_group_size"),
        ({"quantization": "file", "quantization_zero_points": True}, "quantization_zero_points"),
    ):
        with pytest.raises(ConfigError) as caught:
            LLM("nothing", **options)
        assert caught.value.field == field
