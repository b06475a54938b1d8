"""Quantized weights over ranks on a GPU: with `deterministic` every number of ranks has the bits of one, whether rows
are in 16 bits or in fp8 or int8, whose scales ranks agree on. Where there are fewer GPUs than ranks, processes share
one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire import SamplingParams
from tests.fp8_checkpoints import KINDS
from tests.gpu.models import config_of, weights_of
from tests.gpu.test_ranks import PROMPTS, answers, engine
from tests.integer_checkpoints import AWQ, Packer, Stored, awq, compressed, compressed_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EIGHT: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
                         "num_key_value_heads": 2, "head_dim": 32}
FOUR = EIGHT | {"num_attention_heads": 4, "head_dim": 64}
THREE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 288, "num_attention_heads": 3,
                         "num_key_value_heads": 1, "head_dim": 64}
"""Uneven: nine units of 32 in eight slices of the MLP, and two heads in a block of 128 columns."""
W8A8 = (compressed(8, -1, plain=True), compressed_config(8, -1, plain=True))
KEPT = (None, compressed_config(8, -1, plain=True) | {"ignore": ["re:.*k_proj", "model.layers.0.mlp.down_proj"]})
"""Floats all, of which the config excludes some."""


def checkpoint(folder: Path, sizes: dict[str, Any], form: tuple[Packer | None, dict[str, Any]] | None) -> None:
    """A Llama in bf16, its layers' projections packed in a format of files."""
    config = {**config_of("llama"), **sizes}
    stored: Stored = {}
    for name, weight in weights_of(config):
        pack = None if form is None else form[0]
        if pack is not None and name.endswith("_proj.weight"):
            tensors, _ = pack(weight.float())
            stored.update({f"{name.removesuffix('.weight')}.{member}": each for member, each in tensors.items()})
        else:
            stored[name] = weight.to(torch.bfloat16)
    if form is not None:
        config["quantization_config"] = form[1]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")


CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], list[tuple[int, int]]]] = {
    "fp8": (EIGHT, None, {"quantization": "fp8"}, [(2, 1), (4, 1), (8, 1), (2, 2)]),
    "fp8, uneven": (THREE, None, {"quantization": "fp8"}, [(2, 1), (3, 1)]),
    "fp8 without graphs": (EIGHT, None, {"quantization": "fp8", "enforce_eager": True}, [(3, 1)]),
    "int8": (EIGHT, None, {"quantization": "int8"}, [(2, 1), (3, 1)]),
    "int8 in groups": (EIGHT, None, {"quantization": "int8", "quantization_group_size": 64}, [(2, 1)]),
    "int4": (FOUR, None, {"quantization": "int4", "quantization_group_size": 64}, [(2, 1), (3, 1)]),
    "W8A8 of a file": (EIGHT, W8A8, {"quantization": "file"}, [(2, 1), (3, 1)]),
    "fp8 dynamic of a file": (EIGHT, KINDS["compressed, a scale a row"], {"quantization": "file"}, [(3, 1)]),
    "fp8 static of a file": (EIGHT, KINDS["compressed, static"], {"quantization": "file"}, [(2, 1)]),
    "fp8 in blocks": (EIGHT, KINDS["blocks"], {"quantization": "file"}, [(2, 1)]),
    "fp8 in blocks that ranks cut": (THREE, KINDS["blocks"], {"quantization": "file"}, [(2, 1), (3, 1)]),
    "fp8 but for keys and one down": (EIGHT, KEPT, {"quantization": "fp8"}, [(2, 1), (3, 1)]),
    "AWQ": (FOUR, (awq(), AWQ), {"quantization": "file"}, [(2, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_deterministic_mode_gives_the_bits_of_one_rank(kind: str, tmp_path: Path) -> None:
    shapes, form, options, sizes = CASES[kind]
    checkpoint(tmp_path, shapes, form)
    said = {"dtype": "bfloat16", "deterministic": True, **options}
    with engine(tmp_path, **said) as llm:
        want = answers(llm)
    for tensor, stages in sizes:
        with engine(tmp_path, tensor_parallel_size=tensor, pipeline_parallel_size=stages, **said) as llm:
            assert answers(llm) == want, (tensor, stages)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_the_fast_mode_over_ranks_is_near_one_rank(quantization: str, tmp_path: Path) -> None:
    """There each rank's rows, and weights made at load, have scales of their own: other bits, the same model."""
    checkpoint(tmp_path, EIGHT, None)
    one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    found = []
    for size in (1, 2):
        with engine(tmp_path, dtype="bfloat16", quantization=quantization, tensor_parallel_size=size) as llm:
            outputs = llm.generate(PROMPTS, one, use_tqdm=False)
            found.append([next(iter(output.outputs[0].logprobs or ())) for output in outputs])
    gaps = [abs(mine[token].logprob - theirs[token].logprob) for mine, theirs in zip(*found, strict=True)
            for token in mine if token in theirs]
    assert len(gaps) > 2 * len(PROMPTS) and sum(gaps) / len(gaps) < 0.1
