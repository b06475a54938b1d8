"""The accuracy command: float32 does not differ from itself, integers do a little, `in_floats` keeps every weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.bench.cpu import accuracy
from quire.bench.cpu.accuracy import Asked, decoder_of, in_floats
from quire.bench.whole_pass import last_logits, logits_of
from quire.eval.paired import kl_by_position
from quire.eval.tasks import Result
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


def test_texts_with_one_beginning_have_the_logits_of_each_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "awq", awq(), AWQ)
    texts, kept = [TOKENS, [*TOKENS[:11], 7], [*TOKENS[:11], 7, 9], [5, 6], [5, 6]], [2, 4, 1, 1, 2]
    for name in ("float32", "file", "int8-kv"):
        with torch.inference_mode():
            decoder = decoder_of(name, str(tmp_path / "awq"), 64, 1)
            for text, count, found in zip(texts, kept, last_logits(decoder, texts, kept), strict=True):
                assert torch.equal(found, logits_of(decoder, text)[-count:]), name


def test_answers_that_were_kept_are_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[str] = []

    def ask(name: str, stored: str, task: str, asked: Asked) -> Result:
        asked_for.append(name)
        return Result(task, {"acc": 0.5, "perplexity": 2.0}, [True, False], 0, [True, name == "file"])

    write_checkpoint(tmp_path / "awq", awq(), AWQ)
    monkeypatch.setattr(accuracy, "_ask", ask)
    asked = Asked(str(tmp_path / "awq"), ("lambada",), 2, 1, str(tmp_path / "kept"))
    first = list(accuracy.measure(asked, ["file"], 0))
    assert asked_for == ["float32", "file"]
    again = list(accuracy.measure(asked, ["file", "int8-kv"], 0))
    assert asked_for == ["float32", "file", "int8-kv"]
    points = [line["points"] for line in (first[1], again[1], again[2])]
    assert points == [50.0, 50.0, 0.0]
