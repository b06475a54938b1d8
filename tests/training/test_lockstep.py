"""Answers in lockstep are the engine's own, whatever rows they are in and whatever was there before."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.cli import train_eagle
from quire.cli.commands import UsageError
from quire.errors import EngineError, InvariantError
from quire.models.loader.source import resolve_model
from quire.training import generate
from quire.training.lockstep import Lockstep, LockstepGenerator, Spoken, Voice
from quire.training.parts import Writer
from quire.training.rows import CHUNK, Rows
from quire.training.target import Seen, Target
from quire.training.texts import Texts, without_loop
from tests.checkpoints import make_checkpoint

PROMPTS = [[random.Random(i).randrange(3, 97) for _ in range(1 + 5 * i % 23)] for i in range(11)]
MOST = [3 + 7 * i % 50 for i in range(11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    make_checkpoint(made, "llama")
    return made


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    torch.set_num_threads(1)
    return Target(resolve_model(str(folder)), "cpu", 1)


def spoken(lockstep: Lockstep, jobs: Sequence[tuple[int, list[int], float, int]]) -> dict[int, Spoken]:
    waiting = iter(jobs)
    return {each.name: each for several in lockstep.speak(lambda: next(waiting, None), lambda: False)
            for each in several}


def test_greedy_answers_are_those_of_the_engine(folder: Path, target: Target) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for most in MOST]
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1) as llm:
        wanted = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]
    jobs = [(i, prompt, 0.0, most) for i, (prompt, most) in enumerate(zip(PROMPTS, MOST, strict=True))]
    found = spoken(Lockstep(Rows(target, 3, 80, 0), ()), jobs)
    assert [found[i].tokens for i in range(len(jobs))] == wanted
    assert not any(each.stopped for each in found.values())
    # The last token of the longest answer, and the first of any, as ends: answers end with them.
    for end in (wanted[-1][-1], wanted[0][0]):
        found = spoken(Lockstep(Rows(target, 4, 80, 0), (end,)), jobs)
        for i, whole in enumerate(wanted):
            cut = whole[: whole.index(end) + 1] if end in whole else whole
            assert (found[i].tokens, found[i].stopped) == (cut, end in whole)


def test_drawn_answers_follow_the_distribution(target: Target) -> None:
    rows = Rows(target, 64, 32, 5)
    logits = torch.zeros(64, 4)
    logits[:, 0] = np.log(6.0)
    temperatures = torch.ones(64)
    temperatures[32:] = 0.5
    drawn = torch.stack([rows._draw(logits, temperatures) for _ in range(400)])
    assert abs((drawn[:, :32] == 0).float().mean() - 6 / 9) < 0.02
    assert abs((drawn[:, 32:] == 0).float().mean() - 36 / 39) < 0.02


def test_a_row_ends_with_its_length_and_when_it_is_late(target: Target) -> None:
    found = spoken(Lockstep(Rows(target, 2, 40, 0), ()), [(0, PROMPTS[1], 1.0, 1000), (1, PROMPTS[2], 1.0, 1000)])
    assert [len(found[i].tokens) + len(PROMPTS[1 + i]) for i in range(2)] == [40, 40]
    names, looks = itertools.count(), iter((False, False, False, True))
    chunks = list(Lockstep(Rows(target, 2, 400, 0), ()).speak(
        lambda: (next(names), PROMPTS[3], 1.0, 1000), lambda: next(looks)))
    assert [len(each.tokens) for each in chunks[-1]] == [3 * CHUNK + 1] * 2


class Scripted:
    """Rows that say what they are told to."""

    count, length = 3, 400

    def __init__(self) -> None:
        self.at = 0

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], temperatures: Sequence[float]) -> None:
        pass

    def run(self) -> np.ndarray:
        steps = np.arange(self.at, self.at + CHUNK + 1)
        self.at += CHUNK
        return np.stack([steps, steps % 20, np.where(steps < 100, steps, steps % 45)], 1)


def test_an_answer_that_repeats_itself_ends() -> None:
    jobs = [(i, [1], 0.0, 300) for i in range(3)]
    found = spoken(Lockstep(Scripted(), ()), jobs)  # type: ignore[arg-type]
    assert len(found[0].tokens) == 300
    assert len(found[1].tokens) < 200 and found[1].tokens[:45] == [*range(20), *range(20), *range(5)]
    assert 200 < len(found[2].tokens) < 280


class Letters:
    """A tokenizer of a small vocabulary."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [3 + ord(letter) % 90 for letter in text[-60:]]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(32 + token) for token in tokens)

    def apply_chat_template(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return f"<{messages[-1]['content']}>"


def generator(target: Target, most: int = 30) -> LockstepGenerator:
    voice = Voice(Letters(), 200)  # type: ignore[arg-type]
    return LockstepGenerator(target, voice, Rows(target, 8, 200, 1), (2,), 1, most)


def test_texts_are_made_in_lockstep_and_checked_by_the_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generator(target)
    pairs = list(made.converse(1500))
    assert sum(len(answer) for _, answer in pairs) >= 1500 and all(len(answer) <= 30 for _, answer in pairs)
    assert made.agreed is not None and made.agreed > 0.98
    assert list(generator(target).converse(1500)) == pairs
    real = target.see

    def wrong(tokens: torch.Tensor) -> Seen:
        seen = real(tokens)
        return Seen(seen.states, seen.final, (seen.best + 1) % 97)

    monkeypatch.setattr(target, "see", wrong)
    with pytest.raises(EngineError, match="lockstep"):
        list(generator(target).converse(1500))


def test_an_answer_is_cut_where_a_run_of_tokens_comes_for_the_third_time() -> None:
    draw = random.Random(2)
    for _ in range(200):
        tokens = [draw.randrange(40) for _ in range(draw.randrange(60))]
        again = tokens + [draw.randrange(40) for _ in range(draw.randrange(12, 30))] * draw.randrange(1, 5)
        runs = [tuple(again[at : at + 12]) for at in range(len(again) - 11)]
        third = [at for at, run in enumerate(runs) if runs[:at].count(run) == 2]
        assert without_loop(again) == (again[: third[0]] if third else again)


def test_a_prompt_that_fills_its_row_is_refused_and_closed_rows_say_nothing(target: Target) -> None:
    rows = Rows(target, 2, 32, 0)
    with pytest.raises(EngineError, match="a prompt of 32 tokens in rows of 32"):
        spoken(Lockstep(rows, ()), [(0, [5] * 32, 0.0, 4)])
    rows.close()
    with pytest.raises(InvariantError, match="closed"):
        rows.run()


@pytest.mark.parametrize("or_engine", [True, False])
def test_one_process_goes_on_with_an_engine_unless_lockstep_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, or_engine: bool
) -> None:
    def fails(*_: object) -> Texts:
        raise torch.OutOfMemoryError("no memory\nat all")

    def by_engine(asked: generate.GenerationOptions, parts: Path, _: object) -> None:
        writer = Writer(parts, asked.run, asked.process)
        writer.add(([1, 2], [3]))
        writer.write()

    said = list[str]()
    monkeypatch.setattr(generate, "_in_lockstep", fails)
    monkeypatch.setattr(generate, "_by_engine", by_engine)
    options = generate.GenerationOptions("model", "cuda", 0, 64, 32, tokens=10, lockstep=True, or_engine=or_engine)
    if or_engine:
        assert generate.make_texts(options, tmp_path, said.append).text(0).tolist() == [1, 2, 3]
        assert said == ["no texts in lockstep (no memory); an engine makes them instead"]
    else:
        with pytest.raises(torch.OutOfMemoryError):
            generate.make_texts(options, tmp_path, said.append)


def test_rows_are_refused_where_nothing_runs_in_lockstep(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    train_eagle.add_arguments(parser)
    given = ["--out", str(tmp_path), "--self", "10", "--rows", "8"]
    with pytest.raises(UsageError, match="--rows goes with answers in lockstep"):
        train_eagle.run(parser.parse_args(given))
