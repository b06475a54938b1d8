"""Grammars in processes of their own: the same masks as without, nobody waits for another's, and each can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import AsyncLLM, InvalidRequestError, SamplingParams, StructuredOutputs
from quire.engine.assembly.grammar_process import start_nursery
from quire.structured.compile_queue import CompileJob, CompileQueue
from quire.structured.compiler import GrammarCompiler
from quire.structured.gate import GrammarGate
from quire.structured.isolated import IsolatedGrammars, IsolatedSequence, RequestGrammar
from quire.structured.packets import CellLimits
from quire.structured.vocabulary import read_vocabulary
from tests.async_engines import last, run, until
from tests.structured.tiny import tiny_llm, tokenizer_of

RULES = "\n".join(["root ::= a0", *(f"a{i} ::= a{i + 1} a{i + 1} | a{i + 1}" for i in range(40)), 'a40 ::= "a" | "b"'])
BOMBS = [{"regex": "(.?){500}"}, {"grammar": RULES}, {"regex": "(.?){499}x"}]
LARGE = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 40} for i in range(800)}}
SHAPES = [{"choice": ["left", "right"]}, {"regex": "[a-z]{2,40}"}, {"json_object": True},
          {"json": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}}}]


def grammars_of(folder: Path, **limits: Any) -> IsolatedGrammars:
    made = CellLimits(**limits)
    size = tokenizer_of("byte_level").vocab_size
    settings = {"options": {"model": str(folder), "load_format": "dummy"}, "vocab_size": size, "eos_token_ids": [2],
                "limits": {name: getattr(made, name) for name in CellLimits.__dataclass_fields__}}
    return IsolatedGrammars(functools.partial(start_nursery, settings), made, 256 << 20, 2)


@pytest.fixture(scope="module")
def isolated(tiny_folder: Path) -> Iterator[IsolatedGrammars]:
    found = grammars_of(tiny_folder)
    yield found
    found.close()


def settle(grammars: IsolatedGrammars, condition: Callable[[], bool], seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        grammars.wait(0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: next(iter(shape)))
def test_masks_are_those_of_a_matcher_in_this_process_also_after_a_move(isolated: IsolatedGrammars,
                                                                        shape: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("byte_level")
    vocabulary = read_vocabulary(tokenizer, tokenizer.vocab_size, {2})
    compiler = GrammarCompiler(lambda: vocabulary)
    spec, dice = StructuredOutputs(**shape), random.Random(7)
    here = compiler.submit(spec)
    claim = isolated.submit(spec, stop_ids=frozenset({2}))
    settle(isolated, lambda: claim.settled and here.settled)
    matchers = [here.result().start(frozenset({2})) for _ in range(3)]
    theirs = [claim.result().start(frozenset({2})) for _ in range(3)]
    outputs: list[list[int]] = [[], [], []]
    for step in range(24):
        for matcher, their, output in zip(matchers, theirs, outputs, strict=True):
            settle(isolated, functools.partial(their.ready, output))
            (mask,) = their.masks(output, [])
            assert mask == matcher.mask(output)
            allowed = [t for t in range(tokenizer.vocab_size) if mask[t >> 3] >> (t & 7) & 1 and t != 2]
            if not allowed:
                continue
            drafts = [dice.choice(allowed), dice.randrange(tokenizer.vocab_size)]
            their.draft(output, drafts)
            settle(isolated, functools.partial(their.drafted, drafts))
            assert their.masks(output, drafts) == matcher.masks(output, drafts)
            output.append(drafts[0])
        if step in (5, 11):  # its process dies: nobody was at work, so nobody is to blame
            settle(isolated, lambda: theirs[0]._cell.link._pid > 0)
            os.kill(theirs[0]._cell.link._pid, signal.SIGKILL)
            settle(isolated, lambda cell=theirs[0]._cell: cell.link.closed)  # type: ignore[misc]
    assert claim.refusal is None
    claim.release()
    compiler.close()


def test_who_takes_too_long_at_a_token_or_in_all_fails_and_is_told(tiny_folder: Path) -> None:
    for limits, words in (({"token_seconds": 0.001}, "for one token"), ({"request_seconds": 0.0}, "used up the 0 s"),
                          ({"memory_bytes": 1 << 20}, "cannot be used")):
        grammars = grammars_of(tiny_folder, **limits)
        try:
            shape: dict[str, Any] = {"json": LARGE} if "memory_bytes" in limits else {"regex": "((.?){100}){100}"}
            heavy = grammars.submit(StructuredOutputs(**shape))
            settle(grammars, lambda heavy=heavy: heavy.settled)  # type: ignore[misc]
            field = f"structured_outputs.{next(iter(shape))}"
            assert heavy.refusal is not None and heavy.refusal.field == field
            # Short of memory the compiler says so, or the C library ends its process.
            said = str(heavy.refusal)
            assert words in said or ("memory_bytes" in limits and "too much memory" in said)
            assert said.startswith(field)
            heavy.release()
        finally:
            grammars.close()


def _started(grammars: IsolatedGrammars, spec: StructuredOutputs, count: int) -> list[IsolatedSequence]:
    """So many requests that have begun."""
    claims = [grammars.submit(spec, stop_ids=frozenset({2})) for _ in range(count)]
    settle(grammars, lambda: all(claim.settled for claim in claims))
    return [claim.result().start(frozenset({2})) for claim in claims]


def test_who_is_asked_with_a_slow_one_is_answered_and_not_to_blame(tiny_folder: Path) -> None:
    """Questions share packets, and so do answers; whoever is slow still fails alone."""
    grammars = grammars_of(tiny_folder, token_seconds=0.02)
    try:
        quick, slow = (tokenizer_of("byte_level").encode(text) for text in "ab")
        seqs = _started(grammars, StructuredOutputs(regex="a[a-z]{2,40}|b(([a-z]?.?){100}){100}"), 12)
        cell = seqs[0].cell
        outputs = [slow if place == 5 else quick for place in range(12)]
        sent: list[bytes] = []
        send, cell.link.send = cell.link.send, lambda data: (sent.append(data), send(data))  # type: ignore
        for seq, output in zip(seqs, outputs, strict=True):
            assert not seq.ready(output)
        grammars.ask_now()
        assert 0 < len(sent) <= 2, "several questions in a packet"
        settle(grammars, lambda: seqs[5].claim.refusal is not None
               and all(seq.ready(output) for seq, output in zip(seqs, outputs, strict=True) if seq is not seqs[5]))
        assert [seq.claim.refusal is not None for seq in seqs] == [place == 5 for place in range(12)]
        assert "for one token" in str(seqs[5].claim.refusal)
        for seq in seqs:
            seq.claim.release()
    finally:
        grammars.close()


def test_questions_that_a_dead_process_never_got_are_nobody_s_fault(isolated: IsolatedGrammars) -> None:
    seqs = _started(isolated, StructuredOutputs(regex="[a-z]{2,30}"), 3)
    cell, output = seqs[0].cell, tokenizer_of("byte_level").encode("a")
    settle(isolated, lambda: cell.link._pid > 0)
    os.kill(cell.link._pid, signal.SIGKILL)
    for seq in seqs:
        assert not seq.ready(output)
    while not cell.link.closed:  # without sending what was asked
        isolated.hub.pump(0.1)
    settle(isolated, lambda: all(seq.ready(output) for seq in seqs))
    assert all(seq.claim.refusal is None and seq.cell is not cell for seq in seqs)
    for seq in seqs:
        seq.claim.release()


def test_who_was_asked_with_the_one_that_a_process_died_of_is_not_to_blame(isolated: IsolatedGrammars) -> None:
    """Masks that were made die with it, so the first who waits may have nothing to do with it."""
    seqs = _started(isolated, StructuredOutputs(regex="[a-z]{3,30}"), 3)
    cell, output = seqs[0].cell, tokenizer_of("byte_level").encode("a")
    settle(isolated, lambda: cell.link._pid > 0)
    os.kill(cell.link._pid, signal.SIGSTOP)
    for seq in seqs:
        assert not seq.ready(output)
    isolated.ask_now()
    os.kill(cell.link._pid, signal.SIGKILL)
    settle(isolated, lambda: cell.link.closed and all(seq.ready(output) for seq in seqs))
    assert all(seq.claim.refusal is None for seq in seqs)
    assert len({id(seq.cell) for seq in seqs}) == 3
    # Who is alone in its cell is to blame for its end.
    longer = tokenizer_of("byte_level").encode("ab")
    settle(isolated, lambda: seqs[1].cell.link._pid > 0)
    os.kill(seqs[1].cell.link._pid, signal.SIGSTOP)
    assert not seqs[1].ready(longer)
    isolated.ask_now()
    os.kill(seqs[1].cell.link._pid, signal.SIGKILL)
    settle(isolated, lambda: seqs[1].claim.refusal is not None)
    assert seqs[0].claim.refusal is None and seqs[2].claim.refusal is None
    for seq in seqs:
        seq.claim.release()


def test_questions_are_counted_beyond_32_bits(isolated: IsolatedGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "serials", itertools.count(2**32 - 2))
    (seq,) = _started(isolated, StructuredOutputs(regex="[a-z]{4,30}"), 1)
    output: list[int] = []
    for token in tokenizer_of("byte_level").encode("abcdef"):
        output.append(token)
        settle(isolated, functools.partial(seq.ready, output))
    assert next(isolated.serials) > 2**32
    (another,) = _started(isolated, StructuredOutputs(regex="[a-z]{4,31}"), 1)
    for one in (seq, another):
        one.claim.release()


def test_many_sequences_of_a_grammar_have_several_cells_and_few_have_one(tiny_folder: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    # Nothing is slow here, however busy the machine: slow requests get cells of their own.
    grammars, spec = grammars_of(tiny_folder, mask_quick_seconds=1.0), StructuredOutputs(regex="[a-z]{2,30}")
    try:
        seqs = _started(grammars, spec, 64)
        cells = [seq.cell for seq in seqs]
        assert len(set(cells)) == 2 and {cells.count(cell) for cell in cells} == {32}
        output = tokenizer_of("byte_level").encode("a")
        settle(grammars, lambda: all([seq.ready(output) for seq in seqs]))
        assert len({seq.masks(output, [])[0] for seq in seqs}) == 1
        sibling = seqs[40].claim.start(frozenset({2}))
        assert sibling.cell is cells[40], "what a request computes is counted in one place"
        for seq in seqs:
            seq.claim.release()
        assert [cell.link.closed for cell in dict.fromkeys(cells)].count(False) == 1
        # Whoever comes now has a mask at once, and the cell that is left.
        claim = grammars.submit(spec, stop_ids=frozenset({2}))
        assert claim.settled
        (late,) = _started(grammars, spec, 1)
        assert not late.cell.link.closed and late.masks([], []) == [seqs[0].first_mask]
        other = grammars.submit(spec, stop_ids=frozenset({2, 70}))  # ends at another token: not the same mask
        assert not other.settled
        settle(grammars, lambda: other.settled)
    finally:
        grammars.close()


def test_a_step_waits_for_masks_in_proportion_to_the_last() -> None:
    gate, waited = GrammarGate(), list[float]()
    gate.isolated = SimpleNamespace(owes_masks=True, pump=waited.append)  # type: ignore[assignment]
    for seconds in (0.0, 0.001, 0.1, 9.0):
        gate.step_took(seconds)
        assert not list(gate.settled())
    assert waited == pytest.approx([0.01, 0.01, 0.02, 0.03])


class _Link:
    """Notes what is done to it."""

    def __init__(self, low: bool) -> None:
        self.low = low
        self.runs = True
        self.cpu_seconds = 0.0

    def pause(self) -> None:
        self.runs = False

    def resume(self) -> None:
        self.runs = True


def _jobs(queue: CompileQueue, *tenants: str) -> tuple[list[CompileJob], list[str]]:
    given_up: list[str] = []
    jobs = [CompileJob(tenant, _Link, given_up.append) for tenant in tenants]  # type: ignore[arg-type]
    for job in jobs:
        queue.add(job)
    return jobs, given_up


def _compute(queue: CompileQueue, now: list[float], jobs: list[CompileJob], times: int, speed: float = 1.0) -> None:
    """A tenth of a second passes so often, in which those that are not paused compute, at some speed."""
    for _ in range(times):
        now[0] += 0.1
        for job in jobs:
            if job.link is not None and job.link.runs:  # type: ignore[attr-defined]
                job.link.cpu_seconds += 0.1 * speed  # type: ignore[misc]
        queue.turn()


def test_a_small_grammar_does_not_wait_behind_large_ones_and_waiting_takes_no_time() -> None:
    now = [0.0]
    queue = CompileQueue(2, 30.0, lambda: now[0])
    large, given_up = _jobs(queue, *["a"] * 4)
    assert [job.link is not None for job in large] == [True, True, False, False]
    _compute(queue, now, large, 200)
    assert all(job.link is not None for job in large), "each has had turns"
    assert not given_up, "20 s on two places are 10 s for each of four"
    (small,), _ = _jobs(queue, "a")
    assert small.link is not None and small.link.runs  # type: ignore[attr-defined]
    assert sum(job.link.runs for job in (*large, small)) == 2  # type: ignore[union-attr]
    queue.remove(small)
    _compute(queue, now, large, 10_000, speed=0.001)
    assert not given_up, "1,000 s in which others had the processors are no time of theirs"
    _compute(queue, now, large, 500)
    assert len(given_up) == 4 and all("took longer than 30 s" in reason for reason in given_up) and not len(queue)


def test_one_tenant_cannot_take_all_compilers() -> None:
    now = [0.0]
    queue = CompileQueue(2, 1000.0, lambda: now[0])
    many, given_up = _jobs(queue, *["greedy"] * 12)
    (one,), _ = _jobs(queue, "modest")
    for _ in range(100):
        _compute(queue, now, [*many, one], 1)
        assert one.running, "it has a place of its own all the time"
    more, dropped = _jobs(queue, *["greedy"] * 12)
    _compute(queue, now, [*many, *more, one], 100)
    assert sum(job.link is not None for job in (*many, *more, one)) >= 16
    assert given_up + dropped and all("try again" in reason for reason in given_up + dropped)


def test_a_grammar_whose_clients_have_all_left_is_not_compiled_on(tiny_folder: Path) -> None:
    grammars = grammars_of(tiny_folder)
    try:
        for number in range(4):
            claims = [grammars.submit(StructuredOutputs(json={**LARGE, "title": str(number)})) for _ in range(2)]
            for claim in claims:
                assert not claim.settled
                claim.release()
        assert len(grammars.queue) == 0
        small = grammars.submit(StructuredOutputs(choice=["yes", "no"]))
        settle(grammars, lambda: small.settled)
        assert isinstance(small.result(), RequestGrammar)
    finally:
        grammars.close()


# ---- a whole engine, with the vocabulary of a real model


async def _ask(llm: AsyncLLM, shape: dict[str, Any], tokens: int = 20) -> Any:
    params = SamplingParams(max_tokens=tokens, seed=1, structured_outputs=StructuredOutputs(**shape))
    return await last(llm.generate("x", params))


def _busy_seconds(pid: int) -> float:
    """Processor time of all processes below this one, so far."""
    total = 0
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + _busy_seconds(int(child))
    return total


def test_a_nursery_whose_engine_has_gone_ends_without_a_word() -> None:
    """Even before it could say that it is there."""
    code = ("import socket; from quire.structured.cell import nursery, CellLimits; ours, theirs = socket.socketpair(); "
            "ours.close(); nursery(theirs, lambda: None, CellLimits())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_long_work_ends_with_the_engine_that_wanted_it() -> None:
    """An engine that is killed cannot tell anybody; what compiles for it sees its socket close."""
    code = ("import socket, sys, time; from quire.structured.cell import nursery, CellLimits; "
            "nursery(socket.socket(fileno=int(sys.argv[1])), lambda: time.sleep(3600), CellLimits())")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    assert b"pid" in ours.recv(1000)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.6)
    ours.close()
    assert process.wait(120) == 0


def test_no_grammar_adds_50_ms_to_another_s_step_and_it_ends_with_its_client(smollm2: str) -> None:
    plans: list[float] = []

    async def longest_plan(llm: AsyncLLM, seconds: float) -> float:
        plans.clear()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await last(llm.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True)))
        return sorted(plans)[-3]  # each bomb comes several times; what other programs do comes once

    async def job(llm: AsyncLLM) -> None:
        llm.on_step_stats = lambda stats: plans.append(stats.plan_seconds)
        assert (await _ask(llm, {"choice": ["yes", "no"]})).outputs[0].text in ("yes", "no")
        seen = []
        for _ in range(5):  # the machine may be busy with others
            undisturbed = await longest_plan(llm, 2.0)
            bombs = [asyncio.create_task(_ask(llm, bomb)) for bomb in BOMBS]
            disturbed = await longest_plan(llm, 3.0)
            seen.append((undisturbed, disturbed))
            if disturbed < undisturbed + 0.05:
                break
        assert seen[-1][1] < seen[-1][0] + 0.05, seen
        for found in await asyncio.gather(*bombs, return_exceptions=True):
            assert isinstance(found, InvalidRequestError) and "of computing for one token" in str(found)
        # Beside bombs others get their shapes; and what is abandoned is not worked on.
        left = [asyncio.create_task(_ask(llm, bomb, 200)) for bomb in BOMBS]
        assert (await _ask(llm, {"choice": ["yes", "no"]})).outputs[0].text in ("yes", "no")
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert llm.engine_pid is not None

        async def rests(pid: int) -> bool:
            before = _busy_seconds(pid)
            await asyncio.sleep(1.0)
            return _busy_seconds(pid) - before < 0.1

        await until(lambda: rests(llm.engine_pid))
        assert (await last(llm.generate("x", SamplingParams(max_tokens=3)))).error is None

    run(job, smollm2, executor="dummy", step_timeout=20.0)


def test_tokens_are_those_of_an_engine_in_this_process_with_drafts_and_siblings_too(tiny_folder: Path) -> None:
    shapes = [*SHAPES[1:], {"regex": "(ab|cd){3,9}"}]
    options: dict[str, Any] = {"num_kv_blocks": 96, "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 4, "adaptive": False}}
    wanted = [SamplingParams(max_tokens=30, seed=place, n=1 + place % 2, ignore_eos=place == 3,
                             structured_outputs=StructuredOutputs(**shape)) for place, shape in enumerate(shapes)]
    prompts = ["ab ab ab", "cd cd", "x", "abab"]

    async def job(llm: AsyncLLM) -> list[Any]:
        return list(await asyncio.gather(*[last(llm.generate(*pair)) for pair in zip(prompts, wanted, strict=True)]))

    with tiny_llm(tiny_folder, **options) as here:
        expected = here.generate(prompts, wanted, use_tqdm=False)
    for found, other in zip(run(job, tiny_folder, load_format="dummy", **options), expected, strict=True):
        assert [(one.token_ids, one.finish_reason, one.stop_reason) for one in found.outputs] == [
            (one.token_ids, one.finish_reason, one.stop_reason) for one in other.outputs]
