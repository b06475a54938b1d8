"""Draft trees change no token, no log-probability and no bit of the logits; what they refuse leaves nothing behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.speculation.choice import Drafts
from quire.speculation.tree import ancestry
from tests.engine_capture import record_logits
from tests.test_speculation import PROMPTS, checkpoint, params, plain, run, speculating

__all__ = ["checkpoint", "plain"]  # fixtures

TREE = {"width": 3, "depth": 5, "nodes": 12}


def trees(method: str = "ngram", **more: Any) -> dict[str, Any]:
    return speculating(method, tree=TREE, **more)


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 17},
    {"block_size": 1, "num_kv_blocks": 110},
    {"block_size": 4, "num_kv_blocks": 28, "swap_space": 0.01, "preemption_mode": "swap"},
    {"enable_prefix_caching": False, "max_steps_in_flight": 3},
], ids=lambda options: "-".join(options) or "default")
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "skip_layers"])
def test_tokens_logprobs_and_bits_are_those_without_drafts(checkpoint: Path, plain: Any, method: str,
                                                           options: dict[str, Any]) -> None:
    more = {"draft_model": {"model": str(checkpoint / "draft")}, "skip_layers": {"skipped_layers": [1]}}
    bits, found, metrics = run(checkpoint, **options, **trees(method, **more.get(method, {})))
    assert found == plain[1]
    assert bits == plain[0]
    assert metrics["spec_accepted_tokens"] > 20
    assert metrics["spec_draft_tokens_at_1"] > metrics["spec_verifications"]  # several at one place
    assert metrics["spec_draft_tokens"] > metrics["spec_accepted_tokens"]


def planted(llm: LLM, outputs: list[list[int]], seed: int) -> None:
    """Make the engine draft trees of any shape, of which some branch is what will be drawn; seeds of requests count."""
    rng, speculator = random.Random(seed), llm._core.scheduler.speculator

    def choose(sequences: list[Any], num_decoding: int, room: int) -> dict[int, Drafts]:
        found = {}
        for seq in sequences:
            shape = speculator._largest(seq)
            count = 0 if shape is None else rng.randint(0, min(shape.nodes, room))
            if count:
                known = outputs[seq.request.seed - 1000][len(seq.tokens) - seq.num_prompt_tokens :]
                found[seq.row] = Drafts(count, *a_tree(rng, count, known))
                room -= count
        return found

    speculator._choose = choose


def a_tree(rng: random.Random, count: int, known: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    parents = tuple(max(-1, i - rng.randint(1, 4)) for i in range(count))
    path = ancestry(parents)[rng.randrange(count)]
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        depth = len(ancestry(parents)[node])
        if node in path and depth <= len(known):
            taken.discard(known[depth - 1])
            tokens.append(known[depth - 1])
        else:
            free = [token for token in range(3, 97) if token not in taken and token not in known[depth - 1 : depth]]
            tokens.append(rng.choice(free))
    return tuple(tokens), parents


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 17},
    {"block_size": 1, "num_kv_blocks": 110},
    {"block_size": 4, "num_kv_blocks": 28, "swap_space": 0.01, "preemption_mode": "swap"},
    {"block_size": 4, "num_kv_blocks": 28, "max_steps_in_flight": 3},
], ids=lambda options: "-".join(options) or "default")
def test_any_branch_of_any_tree_may_be_kept(checkpoint: Path, plain: Any, options: dict[str, Any]) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, **options, **trees()) as llm:
        planted(llm, [tokens for tokens, _, _ in plain[1]], len(options))
        bits, moved = record_logits(llm), moves_counted(llm)
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        llm.check()
    assert [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].finish_reason) for o in outputs] == plain[1]
    assert bits == plain[0]
    assert sum(moved) > 20


def moves_counted(llm: LLM) -> list[int]:
    """Fills up with the number of tokens that each step moved."""
    cache = llm._core.executor._worker._cache  # type: ignore[attr-defined]
    found: list[int] = []
    move = cache.move_tokens

    def counting(table: Any, moves: Any) -> None:
        found.append(len(moves))
        move(table, moves)

    cache.move_tokens = counting
    return found


def test_a_kept_branch_is_moved_and_can_be_continued_from_the_prefix_cache(checkpoint: Path, plain: Any) -> None:
    """What was generated with trees is read again by requests that have it as their prompt."""
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, block_size=4, **trees()) as llm:
        planted(llm, [tokens for tokens, _, _ in plain[1]], 1)
        moved = moves_counted(llm)
        first = llm.generate(PROMPTS, [params(i, max_tokens=24) for i in range(len(PROMPTS))], use_tqdm=False)
        assert sum(moved) > 20
        longer = [prompt + output.outputs[0].token_ids for prompt, output in zip(PROMPTS, first, strict=True)]
        planted(llm, [[]] * 2, 2)
        hits = llm.metrics()["prefix_hit_tokens"]
        again = llm.generate(longer, [params(0, max_tokens=16) for _ in longer], use_tqdm=False)
        assert llm.metrics()["prefix_hit_tokens"] - hits > sum(map(len, longer)) // 2
        llm.check()
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, block_size=4) as llm:
        expected = llm.generate(longer, [params(0, max_tokens=16) for _ in longer], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]


def test_refused_branches_never_reach_the_prefix_cache(checkpoint: Path) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, block_size=1, **trees()) as llm:
        known = set()
        for i, prompt in enumerate(PROMPTS):
            output = llm.generate([prompt], params(i), use_tqdm=False)[0].outputs[0]
            text = [*prompt, *output.token_ids]
            known |= {tuple(text[:n]) for n in range(1, len(text))}
            assert llm.metrics()["kv_blocks_cached"] == len(known)
        assert llm.metrics()["spec_draft_tokens"] > llm.metrics()["spec_accepted_tokens"]


@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_max_tokens_inside_a_tree_ends_there(checkpoint: Path, plain: Any, length: int) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, **trees()) as llm:
        output = llm.generate([PROMPTS[0]], params(0, max_tokens=length), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == plain[1][0][0][:length]
    assert output.finish_reason == "length"


def test_a_text_may_fill_the_model_to_its_last_position(checkpoint: Path) -> None:
    def tokens(**options: Any) -> list[int]:
        with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, max_model_len=48, **options) as llm:
            return llm.generate([PROMPTS[0]], params(0, max_tokens=1000), use_tqdm=False)[0].outputs[0].token_ids

    assert tokens(**trees()) == tokens()


def test_several_samples_share_their_prompt_and_no_branch(checkpoint: Path) -> None:
    def outputs(**options: Any) -> list[Any]:
        with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, block_size=4, **options) as llm:
            found = llm.generate(PROMPTS[3:6], [params(1, n=3), params(3, n=2), params(0)], use_tqdm=False)
            llm.check()
            return [[(o.token_ids, o.cumulative_logprob) for o in one.outputs] for one in found]

    assert outputs(**trees()) == outputs()


def test_an_abort_between_steps_with_trees_frees_everything(checkpoint: Path) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, max_steps_in_flight=2, **trees()) as llm:
        for steps in range(1, 8):
            llm.add_request("r", PROMPTS[0], params(0))
            for _ in range(steps):
                llm.step()
            llm.abort("r")
            while llm.has_unfinished_requests():
                llm.step()
            llm.check()
            assert llm.metrics()["kv_blocks_used"] == 0
