"""The requests a front door is waiting for: feeds the scheduler's news to each one's output."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from quire.engine.outputs.detokenizer import TextDecoder
from quire.engine.outputs.news import SequenceNews
from quire.engine.outputs.output import RequestOutput
from quire.engine.outputs.output_processor import OutputProcessor
from quire.scheduler.request import Request, Sequence
from quire.scheduler.scheduler import SequenceUpdate


@dataclass(slots=True)
class News:
    """One request that has changed; `stopped` are sequences that a stop string ended, with that string."""

    processor: OutputProcessor
    stopped: list[tuple[Sequence, str]] = field(default_factory=list)
    finished: bool = False

    @property
    def presentable(self) -> bool:
        """There is something to show: which of several sequences are returned may be known only at the end."""
        return self.finished or not self.processor.silent_until_done

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

    def process(self, updates: Iterable[SequenceUpdate], until_done: Container[str] = ()) -> list[News]:
        """The scheduler's updates as news, one for each request that still has a reader; for requests in `until_done`
        only updates that may end them."""
        found: dict[str, News] = {}
        for update in updates:
            request = update.request
            name = request.request_id
            processor = self._processors.get(name)
            if processor is None:
                continue
            if processor.single and is_one_token(update):
                told = update.logprobs
                stop = processor.process_token(update.new_tokens[0], time.time, None if told is None else told[0])
                if stop is None and name in until_done:
                    continue
            else:
                processor.started(request.first_scheduled_time, request.num_cached_tokens)
                stop = processor.take(SequenceNews.of(update), time.time())
            news = found.get(name)
            if news is None:
                news = found[name] = News(processor)
            if stop is not None:
                news.stopped.append((update.sequence, stop))
            if processor.finished:
                news.finished = True
                del self._processors[name]
        return list(found.values())


def is_one_token(update: SequenceUpdate) -> bool:
    """Whether all it says is one more token of a sequence that has some (and its log-probabilities): most updates
    do."""
    seq = update.sequence
    return (len(update.new_tokens) == 1 and seq.num_output_tokens > 1 and seq.finish_reason is None
            and update.prompt_logprobs is None and seq.error is None)
