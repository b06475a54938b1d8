"""The requests a front door is waiting for: feeds the scheduler's news to each one's output."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.engine.detokenizer import TextDecoder
from quire.engine.output import OutputProcessor, RequestOutput
from quire.scheduler.request import FinishReason, Request, Sequence
from quire.scheduler.scheduler import SequenceUpdate


@dataclass(slots=True)
class News:
    """One request that has changed; `stopped` are sequences that a stop string ended, with that string."""

    processor: OutputProcessor
    stopped: list[tuple[Sequence, str]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.processor.finished

    @property
    def presentable(self) -> bool:
        """There is something to show: which of several sequences are returned may be known only at the end."""
        return self.processor.finished or not self.processor.silent_until_done

    def output(self) -> RequestOutput:
        return self.processor.output()


class OutputStreams:
    def __init__(self, tokenizer: TextDecoder | None) -> None:
        self._tokenizer = tokenizer
        self._processors: dict[str, OutputProcessor] = {}

    def add(self, request: Request, prompt: str | None) -> None:
        self._processors[request.request_id] = OutputProcessor(
            request.request_id, request.params, self._tokenizer, request.prompt_token_ids, prompt,
            num_sequences=None if request.beams is None else request.width, seed=request.seed,
            arrival_time=request.arrival_time)

    def waits_for(self, request_id: str) -> bool:
        return request_id in self._processors

    def process(self, updates: Iterable[SequenceUpdate]) -> list[News]:
        """What updates mean for their requests, one piece of news for each that somebody waits for."""
        found: dict[str, News] = {}
        for update in updates:
            processor = self._processors.get(update.request.request_id)
            if processor is not None:
                news = found.setdefault(update.request.request_id, News(processor))
                self._take(update, processor, news)
        return list(found.values())

    def _take(self, update: SequenceUpdate, processor: OutputProcessor, news: News) -> None:
        request, seq = update.request, update.sequence
        processor.num_cached_tokens = request.num_cached_tokens
        processor.metrics.first_scheduled_time = request.first_scheduled_time
        processor.metrics.counts = request.counts
        if update.prompt_logprobs:
            processor.add_prompt_logprobs(update.prompt_logprobs)
        if seq.error is not None:
            processor.error = seq.error
        if seq.score is not None and seq.cumulative_logprob is not None:
            processor.set_score(seq.index, seq.cumulative_logprob, seq.score)
        if request.beams is not None and seq.finish_reason is FinishReason.ABORT:
            processor.end_missing({other.index for other in request.sequences})
        change = processor.process(update.new_tokens, update.logprobs, seq.finish_reason, seq.stop_reason,
                                   index=seq.index, now=time.time())
        if processor.finished:
            self._processors.pop(request.request_id, None)
        if change.hit_stop_string and isinstance(change.stop_reason, str) and not seq.finished:
            news.stopped.append((seq, change.stop_reason))
