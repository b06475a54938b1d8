"""Masks of a grammar through the device worker, with a grammar of our own so that no library is needed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from tests.worker.gpu.engines import QWEN3, make_engine, run
from tests.worker.gpu.head_cases import asked, faint

STRIDE = 7


class Counting:
    """After n tokens only those may come whose id leaves the remainder n when divided by the stride."""

    masks_of_all = None

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def mask(self, output: Sequence[int]) -> bytes:
        allowed = np.zeros(-(-self._vocab // 32) * 32, np.uint8)
        allowed[len(output) % STRIDE : self._vocab : STRIDE] = 1
        return np.packbits(allowed, bitorder="little").tobytes()

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        return [self.mask([*output, *drafts[:place]]) for place in range(len(drafts) + 1)]

    def ready(self, output: Sequence[int]) -> bool:
        return True

    def over(self, output: Sequence[int], must_know: bool = True) -> bool:
        return False


class Grammars:
    """In the place of a compiler: every grammar is there at once, and is the one above."""

    def __init__(self, vocab: int) -> None:
        self._grammar = SimpleNamespace(start=lambda stop_ids: Counting(vocab))

    def submit(self, spec: Any, tenant: str | None = None, stop_ids: frozenset[int] = frozenset()) -> Any:
        return SimpleNamespace(settled=True, result=lambda: self._grammar, release=lambda: None)

    def close(self) -> None:
        pass


def constrained(core: Any, vocab: int) -> dict[str, Any]:
    """What an engine makes of requests with and without that grammar."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 9, "logprobs": 2},
        {"temperature": 0.7, "repetition_penalty": 1.3},
    ]
    core.grammars = Grammars(vocab)
    requests = [
        Request(f"{'held' if i % 3 else 'free'}{i}", [(5 * i + 3 * j) % vocab for j in range(4 + 9 * i)],
                SamplingParams(max_tokens=18, ignore_eos=True, structured_outputs={"choice": ["a"]} if i % 3 else None,
                               **kinds[i % 4]), seed=i, arrival_time=0.0)
        for i in range(9)
    ]  # fmt: skip
    return run(core, requests)


def assert_kept(found: dict[str, Any]) -> None:
    for name, (tokens, _, _, error) in found.items():
        assert error is None and len(tokens) == 18
        if name.startswith("held"):
            assert [token % STRIDE for token in tokens] == [place % STRIDE for place in range(18)]


@pytest.mark.parametrize("depth", [1, 2])
def test_constrained_tokens_are_those_of_the_plain_worker(depth: int) -> None:
    vocab = QWEN3["vocab_size"]
    plain = constrained(make_engine(QWEN3, device=False), vocab)
    assert_kept(plain)
    assert constrained(make_engine(QWEN3, device=True, depth=depth), vocab) == plain


def speculated(core: Any, count: int = 8) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """What becomes of requests of which half are under that grammar, and the drafts of each: accepted, and all."""
    core.grammars = Grammars(QWEN3["vocab_size"])
    requests = [
        Request(f"{'free' if i % 2 else 'held'}{i}", [7 + i, 8, 9, 10 + i] * 3,
                SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.7 * (i % 4 > 1),
                               repetition_penalty=1.2 if i == 4 else 1.0,
                               structured_outputs=None if i % 2 else {"choice": ["a"]}), seed=i, arrival_time=0.0)
        for i in range(count)
    ]
    found = {name: (tokens, error) for name, (tokens, _, _, error) in run(core, requests).items()}
    core.scheduler.check()
    drafts = {one.request_id: (one.counts.accepted_tokens, one.counts.draft_tokens) for one in requests}
    core.close()
    return found, drafts


@pytest.mark.parametrize("kind, more", [
    ("eagle", {}), ("eagle3", {}), ("eagle", {"verifier": "rejection"}),
    ("eagle", {"tree": {"width": 2, "depth": 3, "nodes": 5}}),
], ids=lambda case: case if isinstance(case, str) else "-".join(case) or "chain")
def test_lookups_draft_for_rows_under_a_grammar_beside_a_heads_drafts(kind: str, more: dict[str, Any]) -> None:
    plain, _ = speculated(make_engine(QWEN3, device=True, depth=2, weights=faint))
    found, drafts = speculated(make_engine(QWEN3, device=True, depth=2, **asked(kind, **more)))
    same = [name for name in plain if "verifier" not in more or name in ("held0", "free1", "held4", "free5")]
    assert len(same) >= 4 and {name: found[name] for name in same} == {name: plain[name] for name in same}
    assert all(error is None and len(tokens) == 60 for tokens, error in found.values())
    for name, (tokens, _) in found.items():
        if name.startswith("held"):
            assert [token % STRIDE for token in tokens] == [place % STRIDE for place in range(60)]
    assert all(offered for _, offered in drafts.values())
    assert drafts["held0"][0] > 10 and sum(drafts[f"free{i}"][0] for i in (1, 3, 5, 7)) > 10
