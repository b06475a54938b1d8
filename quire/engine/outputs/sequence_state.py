"""One sequence between two steps: its tokens, text and log-probabilities, and what of them its caller has seen."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.outputs.detokenizer import TextDecoder
from quire.engine.outputs.output import CompletionOutput, Snapshot
from quire.engine.outputs.sequence_logprobs import SequenceLogprobs
from quire.engine.outputs.sequence_text import SequenceText
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import LogprobRecord, logprob_of


class SequenceState:
    """Takes new tokens in, and hands out what is new or all there is."""

    __slots__ = (
        "_new_text",
        "_num_reported",
        "_reported_end",
        "_text",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "score",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, index: int, params: SamplingParams, tokenizer: TextDecoder | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        wanted = params.logprobs is not None
        own = tokenizer if params.detokenize else None
        self.logprobs = SequenceLogprobs(params.logprobs or 0, own) if wanted else None
        self.cumulative_logprob: float | None = 0.0 if wanted or params.ranked else None
        self.score: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._text = SequenceText(params, tokenizer)
        self._new_text: list[str] = []
        self._num_reported = 0
        self._reported_end = False

    @property
    def has_news(self) -> bool:
        """Something of it has not been in an output of its own yet."""
        return (self._num_reported < len(self.token_ids) or any(self._new_text)
                or (self.finish_reason is not None and not self._reported_end))

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobRecord] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> tuple[str, bool]:
        """The text that new tokens give, and whether a stop string ended the sequence with them."""
        if self.finish_reason is not None:
            return "", False
        # A text as the reason is no token's doing.
        by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
        text, kept = self._add_text(token_ids, stopped_by_token=by_token)
        if self._text.stop_string is None and finish_reason is not None:
            text += self._text.finish()
        self._new_text.append(text)
        self.token_ids.extend(token_ids[:kept])
        if self.cumulative_logprob is not None and logprobs is not None:
            if self.logprobs is not None:
                self.logprobs.extend(logprobs[:kept])
            self.cumulative_logprob += sum(map(logprob_of, logprobs[:kept]))
        found = self._text.stop_string
        self.finish_reason = finish_reason if found is None else "stop"
        self.stop_reason = stop_reason if found is None else found
        return text, found is not None

    def take_token(self, token_id: int, logprobs: LogprobRecord | None = None) -> str | None:
        """As `take` for one token that ends nothing; the stop string it completed."""
        if self.finish_reason is not None:
            return None
        self.token_ids.append(token_id)
        if logprobs is not None and self.cumulative_logprob is not None:
            self.cumulative_logprob += logprob_of(logprobs)
            if self.logprobs is not None:
                self.logprobs.add(logprobs)
        self._new_text.append(self._text.push(token_id))
        found = self._text.stop_string
        if found is not None:
            self.finish_reason, self.stop_reason = "stop", found
        return found

    def new_part(self) -> CompletionOutput:
        """What is new since this or `completion` was last asked, and nothing else."""
        delta = self._new_text[0] if len(self._new_text) == 1 else "".join(self._new_text)
        self._new_text = []
        self._reported_end = self.finish_reason is not None
        start, self._num_reported = self._num_reported, len(self.token_ids)
        tokens = self.token_ids[start:]
        logprobs = None if self.logprobs is None else self.logprobs.part(start, self._num_reported)
        return CompletionOutput(self.index, delta, tokens, self.cumulative_logprob, logprobs, self.finish_reason,
                                self.stop_reason, delta, tokens, self.score)

    def completion(self) -> CompletionOutput:
        """The sequence so far, with what is new since this was last asked."""
        delta, self._new_text = "".join(self._new_text), []
        start, self._num_reported = self._num_reported, len(self.token_ids)
        described = self.logprobs
        snapshot = Snapshot(self._text.whole, self._text.num_chars, self.token_ids,
                            None if described is None else described.first,
                            0 if described is None else described.num_values, len(self.token_ids))
        return CompletionOutput.at(snapshot, self.index, self.cumulative_logprob, self.finish_reason, self.stop_reason,
                                   delta, self.token_ids[start:], self.score)

    def _add_text(self, token_ids: Sequence[int], stopped_by_token: bool) -> tuple[str, int]:
        """Detokenize up to a stop string; the text, and how many tokens it took."""
        text, last = "", len(token_ids) - 1
        for place, token in enumerate(token_ids):
            push = self._text.push_stop_token if stopped_by_token and place == last else self._text.push
            text += push(token)
            if self._text.stop_string is not None:
                return text, place + 1
        return text, len(token_ids)
