"""What the scheduler knows of a prompt that another engine computes: who may, and the first token that it draws.

Its KV is written into blocks that are reserved when the request has its turn; meanwhile the request is arriving. How
the other engine is asked is no business of the scheduler's (`quire/peers`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.sampling.token_logprobs import LogprobRecord


@dataclass(slots=True)
class RemotePrefill:
    """A request asks these engines, in this order, to compute its prompt."""

    peers: list[str]
    first_token: bool
    """The other engine draws the first token too. If not, the last token of the prompt is computed here."""
    least_tokens: int = 1
    """A prompt of which fewer tokens are missing here is computed here."""
    given_up: bool = False
    """No other engine is left to ask: the prompt is computed here."""


@dataclass(slots=True)
class FirstToken:
    """What the engine that computed a prompt drew after it."""

    token: int
    logprobs: list[LogprobRecord] | None = None
    prompt_logprobs: list[LogprobRecord] | None = field(default=None)
