"""The accuracy command: float32 does not differ from itself, integers do a little, `in_floats` keeps every weight."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.bench import accuracy as command
from quire.bench.accuracy import table
from quire.bench.cpu import accuracy
from quire.bench.cpu.accuracy import Asked, decoder_of, in_floats
from quire.bench.cpu.kept_scores import KeptScores
from quire.bench.whole_pass import last_logits, logits_of
from quire.errors import QuireError
from quire.eval import data
from quire.eval.paired import kl_by_position
from quire.eval.tasks import Scored
from quire.models.loader.source import resolve_model
from tests.integer_checkpoints import AWQ, awq, write_checkpoint
from tests.models.loader.tiny_gguf import tiny_model, write_gguf

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


def test_a_model_is_compared_in_the_layouts_it_is_written_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", tiny_model("llama"))
    rows = [{"request": {"context": "\u0103\u0104\u0105", "continuation": f"{chr(0x106 + i)}{chr(0x107 + i)}"}}
            for i in range(3)]
    monkeypatch.setattr(data, "rows", lambda name: iter(rows))
    asked = Asked(str(tmp_path / "model.gguf"), ("lambada",), None, 1, files=("awq", "q8_0"))
    lines = list(accuracy.measure(asked, ["int8"], 2))
    found = {(line["format"], line["task"]): line for line in lines}
    assert list(found) == [("float32", "lambada"), *((name, task) for name in ("int8", "awq", "q8_0")
                                                     for task in ("lambada", "kl"))]
    assert 0 < found["q8_0", "kl"]["kl"] < found["awq", "kl"]["kl"] < 1
    shown = list(table(lines, asked.tasks))
    assert len(shown) == 2 + 4 and len({row.count("|") for row in shown}) == 1
    assert f"{found['awq', 'kl']['kl']:.2g}" in next(row for row in shown if row.startswith("| `awq`"))
    with pytest.raises(QuireError, match="fp8-kv needs --device cuda"):
        next(accuracy.measure(asked, ["fp8-kv"], 0))


class Examinee:
    """Says of a continuation how long it is; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        self.asked += [answer for _, answer in pairs]
        return [Scored(-float(len(answer)), len(answer) > 1) for _, answer in pairs]

    def complete(self, contexts: Sequence[str], stops: Sequence[str], max_tokens: int) -> list[str]:
        raise AssertionError


def test_answers_that_were_kept_are_not_asked_for_again(tmp_path: Path) -> None:
    pairs = [("a b", " c"), ("d", " e"), ("f", "g")]
    file, engine = tmp_path / "kept" / "answers.jsonl", Examinee()
    first = KeptScores(file, lambda: engine).score(pairs[:2])
    assert engine.asked == [" c", " e"]
    with file.open("a", encoding="utf-8") as half:
        half.write('["stopped in')
    assert KeptScores(file, lambda: engine).score(pairs) == [*first, Scored(-1.0, False)]
    assert engine.asked == [" c", " e", "g"]
    assert KeptScores(file, lambda: engine).score(pairs[:1]) == first[:1]
    with pytest.raises(QuireError, match="other questions"):
        KeptScores(file, lambda: engine).score([("a b", " x")])


def test_the_command_asks_what_was_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def engine(name: str, stored: str, asked: Asked) -> Examinee:
        made.append(name)
        return Examinee()

    rows = [{"request": {"context": "a", "continuation": answer}} for answer in ("b", "cc")]
    write_checkpoint(tmp_path / "awq", awq(), AWQ)
    monkeypatch.setattr(accuracy, "_engine", engine)
    monkeypatch.setattr(data, "rows", lambda name: iter(rows))
    asked = Asked(str(tmp_path / "awq"), ("lambada",), None, 1, str(tmp_path / "kept"))
    for formats in (["file"], ["file", "int8-kv"]):
        lines = list(accuracy.measure(asked, formats, 0))
        assert [line["format"] for line in lines] == ["float32", *formats]
        assert all((line["acc"], line.get("points", 0.0)) == (0.5, 0.0) for line in lines)
    assert made == ["float32", "file", "int8-kv"]


@pytest.mark.parametrize(("options", "message"), [
    (["--limit", "-1"], "--limit and --kl-texts are 0 or more"),
    (["--num-threads", "0", "--tasks", "--kl-texts", "1"], "num_threads must be between 1 and 1024, not 0"),
    (["--keep", "/dev/null/kept"], "--keep: there can be no folder /dev/null/kept"),
])  # fmt: skip
def test_an_option_without_sense_is_refused_by_its_name(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_gguf(tmp_path / "model.gguf", "llama", tiny_model("llama"))
    monkeypatch.setattr(data, "rows", lambda name: iter([{"request": {"context": "a", "continuation": "b"}}]))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(QuireError, match=message):
        command.run(parser.parse_args(["--model", str(model), *options]))


def test_the_error_of_one_passage_is_null_in_json() -> None:
    assert json.loads(command.written({"kl": 0.5, "kl_error": math.inf})) == {"kl": 0.5, "kl_error": None}
