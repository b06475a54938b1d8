"""The requests a front door is waiting for: feeds the scheduler's news to each one's output."""

from __future__ import annotations

import time
from dataclasses import dataclass

from quire.engine.detokenizer import TextDecoder
from quire.engine.output import OutputProcessor, RequestOutput
from quire.scheduler.request import Request, Sequence
from quire.scheduler.scheduler import SequenceUpdate


@dataclass(slots=True)
class News:
    """One request that has changed; `stopped` is a sequence that a stop string ended, with that string."""

    processor: OutputProcessor
    stopped: tuple[Sequence, str] | None

    @property
    def finished(self) -> bool:
        return self.processor.finished

    def output(self) -> RequestOutput:
        return self.processor.output()


class OutputStreams:
    def __init__(self, tokenizer: TextDecoder | None) -> None:
        self._tokenizer = tokenizer
        self._processors: dict[str, OutputProcessor] = {}

    def add(self, request: Request, prompt: str | None) -> None:
        self._processors[request.request_id] = OutputProcessor(
            request.request_id, request.params, self._tokenizer, request.prompt_token_ids, prompt,
            seed=request.seed, arrival_time=request.arrival_time)

    def process(self, update: SequenceUpdate) -> News | None:
        """What an update means for its request; None when nobody waits for it any more."""
        request, seq = update.request, update.sequence
        processor = self._processors.get(request.request_id)
        if processor is None:
            return None
        now = time.time()
        processor.num_cached_tokens = request.num_cached_tokens
        processor.metrics.first_scheduled_time = request.first_scheduled_time
        if update.prompt_logprobs:
            processor.add_prompt_logprobs(update.prompt_logprobs)
        if seq.error is not None:
            processor.error = seq.error
        change = processor.process(update.new_tokens, update.logprobs, seq.finish_reason, seq.stop_reason,
                                   index=seq.index, now=now)
        if processor.finished:
            del self._processors[request.request_id]
        stopped = change.hit_stop_string and isinstance(change.stop_reason, str) and not seq.finished
        return News(processor, (seq, str(change.stop_reason)) if stopped else None)
