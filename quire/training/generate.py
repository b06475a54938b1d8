"""Makes the texts that a head is trained on, in this process or in several, each with the model of its own.

On a GPU answers are made in lockstep (`lockstep.py`), elsewhere by an engine. Both wait for Python now and then, so
several processes on one GPU make more tokens. A process is told all it needs as JSON, and leaves its texts in a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.child import child_environment, end_with_parent, explain_exit, module_command
from quire.errors import EngineError
from quire.llm import LLM
from quire.models.loader.source import resolve_model
from quire.training.lockstep import LockstepGenerator, Voice
from quire.training.rows import Rows, rows_with_room
from quire.training.target import Target
from quire.training.texts import Generator, Pair, Texts, read_questions

Say = Callable[[str], None]
_SEQUENCES = 2048
_MOST_SEQUENCES = 1024
"""Answers at once on a GPU, over all processes, and of one."""
_CPU_SEQUENCES = 32
_ENGINES = 6
"""Processes where lockstep did not work: an engine leaves more of a GPU to others."""
_ROWS = 6144
"""Answers at once in lockstep on a GPU, over all processes: what its memory and its bandwidth allow a small model."""
_TELL_EVERY = 5.0
"""Seconds."""
_KV_MEMORY = 32
"""GiB of it for their KV."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Where questions come from (a file, or the model itself until its answers have so many tokens); who answers."""

    model: str
    device: str
    seed: int
    max_length: int
    max_answer: int
    data: str | None = None
    tokens: int = 0
    seconds: float | None = None
    """Answers end where they are after so long."""
    until: float | None = None
    """The same, by the clock that all processes of a machine share (`time.monotonic`)."""
    num_threads: int | None = None
    processes: int = 1
    share: int = 1
    """Processes that share the device with this one, itself included."""
    lockstep: bool = False
    """Answers are made in lockstep, not by an engine."""
    or_engine: bool = False
    """But by an engine, where that fails."""
    rows: int | None = None
    """Answers at once in lockstep, over all processes."""

    @property
    def deadline(self) -> float:
        """By `time.monotonic`, of what begins now."""
        return min(float("inf") if self.seconds is None else time.monotonic() + self.seconds,
                   float("inf") if self.until is None else self.until)


def make_texts(options: GenerationOptions, folder: Path, say: Say) -> Texts:
    if options.processes > 1:
        return _in_processes(options, folder, say)
    if not options.lockstep:
        return _by_engine(options, say)
    if not options.or_engine or options.share > 1:
        return _in_lockstep(options, say)
    try:
        return _in_lockstep(options, say)
    except (EngineError, RuntimeError) as error:  # of torch: memory, or a kernel that a chip does not run
        say(f"no texts in lockstep ({str(error).splitlines()[0]}); an engine makes them instead")
    return _by_engine(options, say)


def _in_lockstep(options: GenerationOptions, say: Say) -> Texts:
    source = resolve_model(options.model)
    target = Target(source, options.device, options.num_threads)
    many = max(1, (options.rows or (_ROWS if options.device == "cuda" else _CPU_SEQUENCES)) // options.share)
    many = min(many, rows_with_room(target, options.max_length, options.share))
    many = many if many < 64 else many // 64 * 64
    rows = Rows(target, many, options.max_length, options.seed)
    try:
        generator = LockstepGenerator(target, Voice(source.tokenizer(), rows.length), rows, source.eos_token_ids,
                                      options.seed, options.max_answer, options.deadline)
        say(f"{many} answers at once")
        found = _collected(generator, options, say)
        if generator.agreed is not None:
            say(f"of greedy answers, the target would say {generator.agreed:.1%} of the tokens itself")
        return found
    finally:
        rows.close()


def _by_engine(options: GenerationOptions, say: Say) -> Texts:
    many = min(_MOST_SEQUENCES, max(1, _SEQUENCES // options.share)) if options.device == "cuda" else _CPU_SEQUENCES
    more = {"num_threads": options.num_threads} if options.device == "cpu" else {
        "max_num_seqs": many, "kv_cache_memory": f"{_KV_MEMORY / options.share:.3f}GiB"}
    with LLM(options.model, device=options.device, max_model_len=options.max_length, **more) as llm:
        return _collected(Generator(llm, options.seed, options.max_answer, options.deadline, many + many // 8), options,
                          say)


def _collected(generator: Generator, options: GenerationOptions, say: Say) -> Texts:
    began = time.monotonic()
    questions = None if options.data is None else read_questions(Path(options.data).expanduser())
    pairs, made, told = list[Pair](), 0, began
    for pair in generator.converse(options.tokens) if questions is None else generator.answer(questions):
        pairs.append(pair)
        made += len(pair[1])
        if time.monotonic() - told > _TELL_EVERY:
            told = time.monotonic()
            say(f"{made} tokens in {len(pairs)} answers after {told - began:.0f} s")
    return Texts.of(pairs)


def _in_processes(options: GenerationOptions, folder: Path, say: Say) -> Texts:
    """The questions that a model makes up, shared out: each process has a seed of its own."""
    count = options.processes
    files = [folder / f"texts-{number}.part" for number in range(count)]
    running = []
    for number, path in enumerate(files):
        one = replace(options, seed=options.seed * 1000 + number, tokens=-(-options.tokens // count), processes=1,
                      share=count)
        command = module_command("quire.training.generate", json.dumps(asdict(one)), str(path), str(os.getpid()))
        running.append(subprocess.Popen(command, env=child_environment()))
    try:
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.kill()
    failed = [code for code in codes if code]
    in_time = options.until is None or time.monotonic() < options.until
    if len(failed) == count and options.lockstep and options.or_engine and in_time:
        say(f"no process made any texts in lockstep: {explain_exit(failed[0])}; engines make them instead")
        return _in_processes(replace(options, lockstep=False, processes=max(count, _ENGINES)), folder, say)
    if len(failed) == count:
        raise EngineError(f"no process made any texts: {explain_exit(failed[0])}")
    if failed:
        say(f"{len(failed)} of {count} processes failed: {explain_exit(failed[0])}; their texts are missing")
    found = Texts.joined([Texts.load(path) for path, code in zip(files, codes, strict=True) if not code])
    for path in files:
        path.unlink(missing_ok=True)
    return found


def _main() -> None:
    given, path, parent = sys.argv[1:]
    end_with_parent(int(parent))  # else two would write one file, after the same command is given again
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    options = GenerationOptions(**json.loads(given))
    texts = make_texts(options, Path(path).parent, lambda text: print(f"seed {options.seed}: {text}", flush=True))
    texts.save(Path(path))


if __name__ == "__main__":
    _main()
