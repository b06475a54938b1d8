"""What one step and one request may hold; refuses a request that could never run, and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.errors import InvalidRequestError
from quire.scheduler.request import Request


class PoolShape(Protocol):
    """What a request's limits depend on of a KV pool; a front door in another process knows no more of it."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    def blocks_for(self, num_tokens: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and one sequence may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    max_num_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    fetch_timeout: float = 30.0
    """Seconds that a request waits for KV from another tier before it computes the rest."""
    num_stages: int = 1
    """Stages of a pipeline, each of which computes another step. Stages but the last learn drawn tokens from the next
    plan, so a sequence whose token is in flight is not planned; and a step takes a stage's share of those that decode,
    so that there is something for every stage."""


def longest_allowed(request: Request, limits: Limits, cache: PoolShape) -> int:
    """Most tokens, prompt included, of one of the request's sequences; raises if it could never run."""
    num_prompt = request.num_prompt_tokens
    _refuse_long_prompt(num_prompt, limits, cache)
    if request.width > limits.max_num_seqs:
        name = "beam_width" if request.beams is not None else "best_of" if request.params.best_of else "n"
        raise InvalidRequestError(
            f"{name} {request.width} needs {request.width} sequences at once, and max_num_seqs is "
            f"{limits.max_num_seqs}: lower {name} or raise max_num_seqs", field=name)
    longest = min(limits.max_model_len, cache.max_tokens)
    max_tokens = request.params.max_tokens
    wanted = longest if max_tokens is None else min(longest, num_prompt + max_tokens)
    if request.width == 1:
        return wanted
    return _longest_of_group(request, wanted, cache)


def group_blocks(request: Request, length: int, cache: PoolShape) -> int:
    """Blocks of a group whose sequences all have `length` tokens: full blocks of the prompt are shared."""
    shared = request.num_prompt_tokens // cache.block_size
    return shared + request.width * (cache.blocks_for(length) - shared)


def _longest_of_group(request: Request, wanted: int, cache: PoolShape) -> int:
    """A group runs as one, so the pool must hold all its sequences at their longest."""
    need = group_blocks(request, wanted, cache)
    if need <= cache.num_blocks:
        return wanted
    shared = request.num_prompt_tokens // cache.block_size
    longest = (shared + (cache.num_blocks - shared) // request.width) * cache.block_size
    if request.params.max_tokens is None and longest > request.num_prompt_tokens:
        return longest
    raise InvalidRequestError(
        f"{request.width} sequences of up to {wanted} tokens need {need} KV blocks, and the pool has "
        f"{cache.num_blocks}: lower n, best_of or beam_width, lower max_tokens, or raise num_kv_blocks",
        field="max_tokens")


def _refuse_long_prompt(num_prompt: int, limits: Limits, cache: PoolShape) -> None:
    said = f"the prompt has {num_prompt} tokens"
    if num_prompt == 0:
        raise InvalidRequestError("the prompt is empty: give at least one token", field="prompt")
    if num_prompt >= cache.max_tokens and cache.max_tokens <= limits.max_model_len:
        raise InvalidRequestError(
            f"{said}; with at least one to generate, a pool of num_kv_blocks ({cache.num_blocks}) times "
            f"block_size ({cache.block_size}) allows {cache.max_tokens - 1}: shorten it or raise "
            "num_kv_blocks or kv_cache_memory", field="prompt")
    if num_prompt >= limits.max_model_len:
        raise InvalidRequestError(
            f"{said}; with at least one to generate, max_model_len ({limits.max_model_len}) allows "
            f"{limits.max_model_len - 1}: shorten it or raise max_model_len", field="prompt")
    if not limits.chunked_prefill and num_prompt > limits.max_num_batched_tokens:
        raise InvalidRequestError(
            f"{said} and chunked prefill is off, so max_num_batched_tokens "
            f"({limits.max_num_batched_tokens}) is its limit: turn chunked prefill on or raise it",
            field="prompt")
