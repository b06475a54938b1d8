"""Makes the texts that a head is trained on, in this process or in several, each with the model of its own.

On a GPU answers are made in lockstep (`lockstep.py`), elsewhere by an engine. Both wait for Python now and then, so
several processes on one GPU make more tokens. A process is told all it needs as JSON. Texts are written as they are
made (`parts.py`): after a kill a run goes on with those.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.child import child_environment, end_with_parent, explain_exit, module_command
from quire.errors import EngineError
from quire.llm import LLM
from quire.models.loader.source import resolve_model
from quire.training.given import read_questions
from quire.training.lockstep import LockstepGenerator, Voice
from quire.training.parts import Writer, next_run, written
from quire.training.rows import Rows, rows_with_room
from quire.training.target import Target
from quire.training.texts import Generator, Pair, Texts

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
_SEEDS = 1_000_003
"""Between those of two runs."""
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
    run: int = 0
    """Runs that made texts for the same folder before."""
    process: int = 0

    @property
    def deadline(self) -> float:
        """By `time.monotonic`, of what begins now."""
        return min(float("inf") if self.seconds is None else time.monotonic() + self.seconds,
                   float("inf") if self.until is None else self.until)


def make_texts(options: GenerationOptions, parts: Path, say: Say) -> Texts:
    """Those that the folder `parts` holds, and what is missing of them."""
    try:
        _make(_rest(options, parts), parts, say)
    except (EngineError, RuntimeError) as error:  # of torch: memory, or a kernel that a chip does not run
        if not options.lockstep or not options.or_engine or time.monotonic() >= options.deadline:
            raise
        say(f"no texts in lockstep ({str(error).splitlines()[0]}); an engine makes them instead")
        many = max(options.processes, _ENGINES) if options.processes > 1 else 1
        _make(_rest(replace(options, lockstep=False, processes=many), parts), parts, say)
    found = written(parts)
    return found if options.data is None else found.sorted()  # the same after a kill: answers end in another order


def _rest(options: GenerationOptions, parts: Path) -> GenerationOptions:
    """What is left to make. A model asks itself other questions than in runs before; those of a file stay the same."""
    run = next_run(parts)
    if run == 0 or options.data is not None:
        return replace(options, run=run)
    return replace(options, run=run, seed=options.seed + _SEEDS * run,
                   tokens=max(0, options.tokens - written(parts).num_answered))


def _make(options: GenerationOptions, parts: Path, say: Say) -> None:
    if options.data is None and not options.tokens:
        return
    if options.processes > 1:
        _in_processes(options, parts, say)
    elif options.lockstep:
        _in_lockstep(options, parts, say)
    else:
        _by_engine(options, parts, say)


def _in_lockstep(options: GenerationOptions, parts: Path, say: Say) -> None:
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
        _collect(generator, options, parts, say)
        if generator.agreed is not None:
            say(f"of greedy answers, the target would say {generator.agreed:.1%} of the tokens itself")
    finally:
        rows.close()


def _by_engine(options: GenerationOptions, parts: Path, say: Say) -> None:
    many = min(_MOST_SEQUENCES, max(1, _SEQUENCES // options.share)) if options.device == "cuda" else _CPU_SEQUENCES
    more = {"num_threads": options.num_threads} if options.device == "cpu" else {
        "max_num_seqs": many, "kv_cache_memory": f"{_KV_MEMORY / options.share:.3f}GiB"}
    with LLM(options.model, device=options.device, max_model_len=options.max_length, **more) as llm:
        generator = Generator(llm, options.seed, options.max_answer, options.deadline, many + many // 8)
        _collect(generator, options, parts, say)


def _collect(generator: Generator, options: GenerationOptions, parts: Path, say: Say) -> None:
    """Also what was made when something goes wrong, if it can be trusted."""
    began = time.monotonic()
    writer, count, made, told, done = Writer(parts, options.run, options.process), 0, 0, began, False
    try:
        for pair in _pairs(generator, options, parts):
            writer.add(pair)
            count, made = count + 1, made + len(pair[1])
            if writer.due and generator.trusted:
                writer.write()
            if time.monotonic() - told > _TELL_EVERY:
                told = time.monotonic()
                say(f"{made} tokens in {count} answers after {told - began:.0f} s")
        done = True
    finally:
        if done or generator.trusted:
            writer.write()


def _pairs(generator: Generator, options: GenerationOptions, parts: Path) -> Iterator[Pair]:
    if options.data is None:
        return generator.converse(options.tokens)
    before = written(parts)
    return generator.answer(read_questions(Path(options.data).expanduser()),
                            Counter(before.question(index) for index in range(len(before))))


def _in_processes(options: GenerationOptions, parts: Path, say: Say) -> None:
    """The questions that a model makes up, shared out: each process has a seed of its own."""
    count = options.processes
    running = []
    for number in range(count):
        one = replace(options, seed=options.seed * 1000 + number, tokens=-(-options.tokens // count), processes=1,
                      share=count, process=number)
        command = module_command("quire.training.generate", json.dumps(asdict(one)), str(parts), str(os.getpid()))
        running.append(subprocess.Popen(command, env=child_environment()))
    try:
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.kill()
    failed = [code for code in codes if code]
    if len(failed) == count:
        raise EngineError(f"no process made all of its texts: {explain_exit(failed[0])}")
    if failed:
        say(f"{len(failed)} of {count} processes failed: {explain_exit(failed[0])}; some of their texts are missing")


def _main() -> None:
    given, path, parent = sys.argv[1:]
    end_with_parent(int(parent))  # else two would write one file, after the same command is given again
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    options = GenerationOptions(**json.loads(given))
    _make(options, Path(path), lambda text: print(f"seed {options.seed}: {text}", flush=True))


if __name__ == "__main__":
    _main()
