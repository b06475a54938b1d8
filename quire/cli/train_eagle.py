"""Trains an EAGLE head for a model, on answers that the model itself gives.

The questions come from a file (--data: JSON lines with "messages" or "prompt"), or the model makes them up (--self).
Hidden states are those of the engine; the loss is over several drafted steps, each of which reads what the one before
it guessed. Where it was stopped it goes on. The head is used with speculative_config={"method": "eagle", "model": DIR}.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.commands import UsageError
from quire.errors import ConfigError
from quire.training.options import TrainingOptions

if TYPE_CHECKING:
    from quire.training.eagle import Trainer

EXAMPLES = (
    "examples:\n"
    "  quire train eagle --out head --self 5000000 --device cuda\n"
    "  quire train eagle --model smollm2-135m --out head --data questions.jsonl --steps 500"
)
_DEFAULTS = TrainingOptions()
_UNLIMITED_STEPS = 1_000_000
_ENDING, _EXIT_SECONDS = 0.04, 2.0
"""Of a limited time what is left for the last look at held-out text and for what is written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", metavar="MODEL",
                        help="the model that the head is for (default: %(default)s)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the head, its texts and its progress")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="FILE", help='questions, as JSON lines with "messages" or "prompt"')
    source.add_argument("--self", type=int, metavar="TOKENS", dest="own",
                        help="let the model ask itself, until its answers have so many tokens")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to generate and train")
    parser.add_argument("--num-threads", type=int, metavar="N", help="of a CPU")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn")
    parser.add_argument("--max-answer", type=int, default=384, metavar="TOKENS", help="longest answer (default: 384)")
    parser.add_argument("--generators", type=int, default=1, metavar="N",
                        help="with --self: processes that generate, each with the model of its own (default: 1)")
    parser.add_argument("--generate-with", choices=("auto", "engine", "lockstep"), default="auto",
                        help="who answers: an engine, or the model's rows in lockstep, many more tokens a second on a "
                             "GPU; auto: lockstep there, else an engine")
    parser.add_argument("--rows", type=int, metavar="N",
                        help="answers at once in lockstep, over all processes (default: 6144 on a GPU, or as many as "
                             "its memory holds; else 32)")
    parser.add_argument("--generate-seconds", type=float, default=float("inf"), metavar="S",
                        help="begin no new questions after so long")
    parser.add_argument("--train-seconds", type=float, default=float("inf"), metavar="S", help="stop training then")
    parser.add_argument("--time-limit", type=float, metavar="S",
                        help="end in time, whatever is done by then: a share of it goes into texts, the rest into as "
                             "many steps as it takes; a usable head is there from the first checkpoint on")
    parser.add_argument("--generate-share", type=float, default=0.35, metavar="X",
                        help="of --time-limit, for making texts (default: 0.35)")
    parser.add_argument("--steps", type=int, metavar="N",
                        help=f"batches to train on (default: {_DEFAULTS.steps}; with --time-limit: as it allows)")
    for name, meaning in (("batch_tokens", "tokens of a batch"),
                          ("depth", "drafted steps that are unrolled"),
                          ("draft_vocab", "most tokens that the head can guess"), ("intermediate", "width of its MLP"),
                          ("eval_every", "steps between two looks at held-out text"),
                          ("save_every", "steps between two checkpoints")):
        value = getattr(_DEFAULTS, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, metavar="N",
                            help=f"{meaning} (default: {value})")
    parser.add_argument("--max-length", type=int, metavar="N",
                        help=f"longest text (default: {_DEFAULTS.max_length}, or the model's positions where they are "
                             "fewer)")
    parser.add_argument("--learning-rate", type=float, default=_DEFAULTS.learning_rate, metavar="R",
                        help=f"(default: {_DEFAULTS.learning_rate})")
    parser.add_argument("--weight-decay", type=float, default=_DEFAULTS.weight_decay, metavar="W",
                        help=f"of the head's matrices (default: {_DEFAULTS.weight_decay})")
    parser.add_argument("--feature-weight", type=float, default=_DEFAULTS.feature_weight, metavar="W",
                        help="weight of guessed features in the loss, beside tokens (default: 0.1)")
    parser.add_argument("--teacher-temperature", type=float, default=_DEFAULTS.teacher_temperature, metavar="T",
                        help="below 1 the likeliest tokens count more in what the head learns (default: "
                             f"{_DEFAULTS.teacher_temperature})")
    parser.add_argument("--weights", choices=("bfloat16", "int8", "int4"), default=_DEFAULTS.weights,
                        help="how the head is stored; int4: in the 4 bits in which a CPU runs heads of integers, and "
                             f"trained in them (default: {_DEFAULTS.weights})")
    parser.add_argument("--start", choices=("auto", "target", "random"), default=_DEFAULTS.start,
                        help="where training begins: at the model's last layer, or at random; auto: at the layer where "
                             f"its MLP is as wide as --intermediate (default: {_DEFAULTS.start})")


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    from quire.engine.assembly.device import missing_for_gpu
    from quire.models.loader.source import resolve_model
    from quire.models.registry import read_spec
    from quire.training.card import write_card
    from quire.training.eagle import Trainer
    from quire.training.target import Target
    from quire.training.trainable import check_trainable

    if args.steps is None:
        args.steps = _DEFAULTS.steps if args.time_limit is None else _UNLIMITED_STEPS
    _check(args)
    missing = None if args.device == "cpu" else missing_for_gpu()
    if missing is not None:
        raise UsageError(f"--device {args.device} cannot be used: {missing}")
    source = resolve_model(args.model)
    spec = read_spec(source.config)
    if args.max_length is None:
        args.max_length = min(_DEFAULTS.max_length, spec.max_positions)
    options = _options(args)
    check_trainable(spec, options, _memory(args.device))  # before texts are made, which may take hours
    folder = _folder(args.out)
    texts = _texts(args, folder, None if args.time_limit is None else started + args.generate_share * args.time_limit)
    _say(f"{len(texts)} texts of {len(texts.tokens)} tokens")
    trainer = Trainer(Target(source, args.device, args.num_threads), texts, options)
    if trainer.resume(folder):
        _say(f"goes on after step {trainer.step}")
    else:
        _say(f"begins at {'the last layer of the model' if trainer.begins_at_target else 'random'}")
    began = time.monotonic()
    if args.time_limit is not None:
        left = started + args.time_limit - began - _ENDING * args.time_limit - _EXIT_SECONDS
        trainer.options = dataclasses.replace(options, max_seconds=max(1.0, min(options.max_seconds, left)))
    with _bar(trainer.options, trainer.step, args.time_limit is not None) as (say, stepped), _stopping(trainer, say):
        found = trainer.train(folder, say, stepped)
    seconds = trainer.seconds_before + time.monotonic() - began
    write_card(folder, args.model, vars(args), found, trainer.step, seconds, len(texts.tokens))
    _say(f"held-out text: {found}; the head is in {folder}")
    return 0


@contextmanager
def _stopping(trainer: Trainer, say: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C ends the training after the step under way; a second one ends it where it is."""
    def stop(*_: object) -> None:
        trainer.stopping = True
        signal.signal(signal.SIGINT, before)
        os.write(2, b"\nstops after this step; once more: at once\n")  # whatever was being printed

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped after step {trainer.step}: the same command goes on from the last checkpoint")
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(options: TrainingOptions, step: int, limited: bool
         ) -> Iterator[tuple[Callable[[str], None], Callable[[int, float], None] | None]]:
    """How to say something, and whom to tell of every step: a bar of steps, or of seconds where these are limited. Not
    where nobody watches, nor without tqdm."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield _say, None
        return
    from tqdm import tqdm

    total = round(options.max_seconds) if limited else options.steps
    with tqdm(total=total, initial=0 if limited else step, desc="Training", unit="s" if limited else "step",
              dynamic_ncols=True) as bar:
        yield tqdm.write, lambda steps, seconds: bar.update((min(total, round(seconds)) if limited else steps) - bar.n)


def _folder(out: str) -> Path:
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: there can be no folder {out}: {error.strerror}") from None
    return folder


def _memory(device: str) -> int:
    """Free bytes of a device."""
    import torch

    from quire.worker.memory import available_memory

    return available_memory() if device == "cpu" else torch.cuda.mem_get_info()[0]


def _check(args: argparse.Namespace) -> None:
    _check_numbers(args)
    if not 0.0 < args.generate_share < 1.0:
        raise UsageError("--generate-share must be above 0 and below 1")
    if args.rows is not None and args.rows < 1:
        raise UsageError("--rows must be at least 1")
    if args.rows is not None and not _lockstep(args):
        raise UsageError("--rows goes with answers in lockstep: add --generate-with lockstep")
    if args.data is not None and not Path(args.data).expanduser().is_file():
        raise UsageError(f"--data: there is no file {args.data}")
    if args.own is not None and args.own < 1:
        raise UsageError("--self must be at least 1")
    if args.generators > 1 and args.own is None:
        raise UsageError("--generators goes with --self: questions of a file are answered by one engine")
    if not 0.0 < args.teacher_temperature <= 1.0:
        raise UsageError("--teacher-temperature must be above 0 and at most 1")
    if args.depth >= args.max_answer:
        raise UsageError(f"--depth {args.depth} must be below --max-answer {args.max_answer}: no answer is longer")


def _options(args: argparse.Namespace) -> TrainingOptions:
    return TrainingOptions(args.seed, args.steps, args.batch_tokens, args.max_length, args.learning_rate, args.depth,
                           args.feature_weight, args.draft_vocab, args.intermediate, args.eval_every, args.save_every,
                           args.train_seconds, args.teacher_temperature, args.weights, args.weight_decay, args.start)


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("steps", "batch_tokens", "max_length", "depth", "draft_vocab", "intermediate", "eval_every",
                 "save_every", "max_answer", "generators", "num_threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("time_limit", "generate_seconds", "train_seconds", "learning_rate"):
        value = getattr(args, name)
        if value is not None and not value > 0.0:  # nor is nan
            raise UsageError(f"--{name.replace('_', '-')} must be above 0")
    for name in ("time_limit", "learning_rate", "weight_decay", "feature_weight"):
        if getattr(args, name) == float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must not be infinite")
    for name in ("weight_decay", "feature_weight", "seed"):
        if not getattr(args, name) >= 0.0:
            raise UsageError(f"--{name.replace('_', '-')} must not be negative")


def _texts(args: argparse.Namespace, folder: Path, until: float | None) -> Any:
    """Those that the folder holds, else new ones, made until then."""
    from quire.training.generate import GenerationOptions, make_texts
    from quire.training.origin import check_origin, origin_of
    from quire.training.parts import claim
    from quire.training.texts import Texts

    path, parts = folder / "texts.safetensors", folder / "texts.parts"
    made_with = origin_of(args.model, args.data, args.own, args.seed, args.max_length, args.max_answer)
    if path.is_file():
        check_origin(Texts.origin(path), made_with, folder)
        shutil.rmtree(parts, ignore_errors=True)  # of a run that was killed when it had written them all
        return Texts.load(path)
    claim(parts, made_with)
    seconds = None if args.generate_seconds == float("inf") else args.generate_seconds
    options = GenerationOptions(args.model, args.device, args.seed, args.max_length, args.max_answer, args.data,
                                args.own or 0, seconds, until, args.num_threads, args.generators,
                                lockstep=_lockstep(args), or_engine=args.generate_with == "auto", rows=args.rows)
    try:
        texts = make_texts(options, parts, _say)
    except KeyboardInterrupt:
        _say("stopped: the same command goes on with the texts that were written")
        raise
    try:
        if not len(texts):
            raise ConfigError("no text came of it: questions longer than half of --max-length get no answer, nor any "
                              "that come after the time is up", field="max_length")
        texts.usable(args.depth)
    except ConfigError:
        shutil.rmtree(parts)  # else more questions could not be asked in this folder
        raise
    texts.save(path, made_with)
    shutil.rmtree(parts)
    return texts


def _lockstep(args: argparse.Namespace) -> bool:
    return args.generate_with == "lockstep" or (args.generate_with == "auto" and args.device == "cuda")


def _say(text: str) -> None:
    print(text, flush=True)
