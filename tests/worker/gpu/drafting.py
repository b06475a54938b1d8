"""Cases of speculation that run on CPU tensors and, in tests/gpu, on a GPU: the same claims about both."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.core import EngineCore
from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from quire.speculation.options import SpeculationOptions
from tests.worker.gpu.engines import GEMMA3, QWEN3, workload

DRAFT: dict[str, Any] = {**QWEN3, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "num_key_value_heads": 1}
WINDOWS_ONLY: dict[str, Any] = {**GEMMA3, "layer_types": ["sliding_attention", "sliding_attention"]}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "ngram": ({"method": "ngram"}, None),
    "suffix": ({"method": "suffix"}, None),
    "skip_layers": ({"method": "skip_layers"}, None),
    "draft_model": ({"method": "draft_model", "model": "given"}, DRAFT),
    "itself": ({"method": "draft_model", "model": "given"}, QWEN3),
}
"""speculative_config and shapes of the draft model. `itself`: it is the target, so all its drafts are right."""


def speculation(method: str, drafts: int = 3, verifier: str = "coupled") -> dict[str, Any]:
    """Keywords of `make_engine`."""
    config, draft = METHODS[method]
    options = SpeculationOptions.parse({**config, "num_speculative_tokens": drafts, "adaptive": False,
                                        "verifier": verifier})
    return {"speculation": options, "draft": draft}


def looping(count: int = 12, max_tokens: int | None = None, vocab: int = 131) -> list[Request]:
    """Requests of all kinds whose prompts repeat themselves, so that there is something to guess."""
    requests = workload(3, count, vocab)
    for i, request in enumerate(requests):
        request.prompt_token_ids = [7 + i, 8, 9, 10 + i] * 6
        if max_tokens is not None:
            request.params = replace(request.params, max_tokens=max_tokens, min_tokens=0)
        request.sequences.clear()
        request.__post_init__()
    return requests


def trees(verifier: str = "coupled") -> dict[str, Any]:
    """Keywords of `make_engine`."""
    return {"speculation": SpeculationOptions.parse({
        "method": "ngram", "num_speculative_tokens": 4, "adaptive": False, "verifier": verifier,
        "tree": {"width": 3, "depth": 4, "nodes": 9}})}


def forking(count: int = 8, again: bool = False) -> list[Any]:
    """Requests whose prompts go on in several ways after the same tokens. `again`: after some token, repeated, came
    itself, and then something else: of who repeats tokens, the first branch is wrong and the second right."""
    requests = looping(count)
    for i, request in enumerate(requests):
        request.prompt_token_ids = [7, 8, 9, 7, 8, 30 + i, 7, 8, 40, 8, 9, 9, 8, 7, 7, 8] * 2
        if again:
            request.prompt_token_ids = [20 + i] * 5 + [3, 20 + i, 8, 2, 20 + i]
        request.sequences.clear()
        request.__post_init__()
    return requests


def guessed_at_random(count: int = 6) -> list[Request]:
    """Requests that begin and end together, of all kinds whose draws do not read their text: on a GPU each has trees in
    every step."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8}, {"temperature": 0.0}, {"temperature": 1.0, "top_k": 5, "logprobs": 2},
        {"temperature": 1.2, "top_p": 0.6}, {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 0.7, "logit_bias": {7: 4.0, 8: 4.0, 9: 3.0}},
    ]
    requests = []
    for i in range(count):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **kinds[i % len(kinds)])
        text = [7, 8, 9, 7, 8, 30 + i, 7, 8, 40, 8, 9, 9, 8, 7, 7, 8] * 2
        requests.append(Request(f"g{i}", text, params, seed=i, arrival_time=0.0))
    return requests


def remembering(count: int = 6) -> list[Request]:
    """Requests whose draws depend on all of their text so far."""
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 0.0, "frequency_penalty": 1.5, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
    ]
    requests = []
    for i in range(count):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **kinds[i % len(kinds)])
        words = [[rng.randrange(131)] for _ in range(20)] + [[rng.randrange(131), 8] for _ in range(30)]
        requests.append(Request(f"h{i}", [7 + i, 8, 9, 10 + i] * 6, params, seed=i, arrival_time=0.0,
                                bad_words=words if i % 2 else []))
    return requests


def accepted(core: EngineCore) -> tuple[int, int]:
    """Drafts that were kept, and all of them."""
    speculator = core.scheduler.speculator
    assert speculator is not None
    return sum(speculator.stats.accepted), sum(speculator.stats.offered)


@dataclass
class Case:
    """A random engine with drafts, requests for it, and an abort on the way."""

    seed: int

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.config = rng.choice([QWEN3, GEMMA3, WINDOWS_ONLY])
        self.method = rng.choice(list(METHODS))
        self.drafts = rng.choice([1, 2, 3, 5, 8])
        self.depth = rng.choice([1, 2, 3])
        self.block_size = rng.choice([4, 8, 16])
        self.budget = rng.choice([9, 17, 40, 120])
        self.num_blocks = max(rng.choice([14, 24, 60]) * 8 // self.block_size, -(-130 // self.block_size) + 1)
        self.aborted = f"r{rng.randrange(10)}" if rng.random() < 0.5 else None
        self.abort_at = rng.randrange(1, 25)

    def requests(self) -> list[Request]:
        requests, rng = workload(self.seed, 10), random.Random(self.seed)
        for request in requests:
            if rng.random() < 0.6:
                word = [rng.randrange(131) for _ in range(rng.randrange(1, 5))]
                request.prompt_token_ids = word * rng.randrange(1, 9)
                request.sequences.clear()
                request.__post_init__()
        return requests

    def outcome(self, core: EngineCore) -> dict[str, tuple[list[int], str | None]]:
        """Tokens and error of every request."""
        requests = self.requests()
        for request in requests:
            core.add(request)
        steps = 0
        while core.has_work:
            core.step()
            steps += 1
            if steps == self.abort_at and self.aborted is not None:
                core.abort(self.aborted)
        core.scheduler.check()
        return {r.request_id: (r.sequences[0].tokens, r.sequences[0].error) for r in requests}

    def assert_same(self, found: dict[str, Any], plain: dict[str, Any]) -> None:
        for name, (tokens, error) in plain.items():
            if name == self.aborted:
                shorter = min(len(tokens), len(found[name][0]))
                assert found[name][0][:shorter] == tokens[:shorter], (self, name)
            else:
                assert found[name] == (tokens, error), (self, name)


def texts_with_an_abort(core: Any, requests: list[Request], aborted: str) -> dict[str, list[int]]:
    """What each of `looping()` has said when all is done and one of them was aborted after five steps."""
    for request in requests:
        core.add(request)
    for _ in range(5):
        core.step()
    assert core.abort(aborted)
    while core.has_work:
        core.step()
    core.scheduler.check()
    return {request.request_id: request.sequences[0].tokens[request.sequences[0].num_prompt_tokens :]
            for request in requests}  # fmt: skip
