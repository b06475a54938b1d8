"""The accuracy command: float32 does not differ from itself, integers do a little, `in_floats` keeps every weight."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.bench.cpu.accuracy import decoder_of, in_floats
from quire.bench.whole_pass import logits_of
from quire.eval.paired import kl_by_position
from quire.models.loader.source import resolve_model
from tests.integer_checkpoints import awq, write_checkpoint

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28]


def test_formats_of_one_model_differ_as_their_roundings_do(tmp_path: Path) -> None:
    expected = write_checkpoint(tmp_path / "awq", awq(), AWQ)
    model = str(tmp_path / "awq")
    with torch.inference_mode(), in_floats(model) as floats:
        kept = dict(resolve_model(floats).weights())
        assert all(torch.equal(kept[name], expected[name]) for name in expected)
        reference = logits_of(decoder_of("float32", model, 64, 1), TOKENS)
        assert torch.equal(logits_of(decoder_of("float32", floats, 64, 1), TOKENS), reference)
        kl = {
            name: float(kl_by_position(logits_of(decoder_of(name, stored, 64, 1), TOKENS), reference).mean())
            for name, stored in (("file", model), ("int8", floats), ("int4-symmetric", floats))
        }
    assert 0 < kl["file"] < 0.01 and 0 < kl["int8"] < 0.01 and kl["int8"] < kl["int4-symmetric"]
