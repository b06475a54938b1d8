"""The offline front door: load a model, give prompts, get outputs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.assembly.engine import Engine, build_engine
from quire.engine.core import EngineCore
from quire.engine.input import InputProcessor, Params, Prompt
from quire.engine.interrupt import DeferredInterrupt
from quire.engine.metrics import flat_metrics
from quire.engine.outputs.output import RequestOutput
from quire.engine.outputs.streams import News, OutputStreams
from quire.engine.progress import Progress
from quire.engine.trace import StepTrace
from quire.errors import EngineError, InvalidRequestError
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.scheduler.request import FinishReason, Request

if TYPE_CHECKING:
    from quire.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A model with an engine around it.

    Options are those of `quire.config` (`quire generate --help` lists them): `LLM("smollm2-135m", block_size=32)`.
    One thread drives one LLM; several LLMs live happily in one process.
    """

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        self._engine: Engine | None = None
        config = EngineConfig.create(model=model, **options)
        engine = build_engine(config)
        self._open(engine, config, None if config.model.skip_tokenizer_init else engine.source.tokenizer())

    @classmethod
    def over(cls, engine: Engine) -> LLM:
        """Around an engine that was put together by hand, without a tokenizer: what benches time from outside."""
        made = cls.__new__(cls)
        made._open(engine, engine.config, None)
        return made

    def _open(self, engine: Engine, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = engine.spec.vocab_size
        self.max_model_len = engine.pool.max_model_len
        self._engine = engine
        self._inputs = InputProcessor(tokenizer, engine.spec.vocab_size,
                                      frozenset(engine.source.eos_token_ids), config.model.seed)
        self._streams = OutputStreams(tokenizer)
        self._ids = itertools.count()
        self._held_back: list[RequestOutput] = []

    # ---- whole batches

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        tenant: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Outputs for all prompts, in their order.

        A prompt is a string, a list of token ids, or a dict with `prompt` or `prompt_token_ids`. One
        `SamplingParams` serves all prompts; a list gives each its own. A prompt that cannot be served raises, and takes
        the others back with it; one that fails while it runs comes back with its `error` set. No prompts, no outputs.
        """
        batch = _prompt_list(prompts)
        params = _params_list(sampling_params, len(batch))
        ids = self._add_batch(batch, params, _priorities(priority, len(batch)), _tenants(tenant, len(batch)))
        return self._finish_all(ids, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first, as transformers' beam search finds them.

        Beams run beside all other requests and share the KV of what they have in common.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"params must be BeamSearchParams, not {type(params).__name__}", field="params")
        batch = _prompt_list(prompts)
        return self._finish_all(self._add_batch(batch, [params] * len(batch)), use_tqdm)

    def _finish_all(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        steps = self._drive(ids, until_done=True)
        with (DeferredInterrupt() as noted, closing(steps),
              Progress(len(ids), self._core.scheduler.stats, enabled=use_tqdm) as progress):
            for found in steps:
                for news in found:
                    if news.finished:
                        finished[news.processor.request_id] = news.output()
                progress.update(len(finished))
                noted.check()
        return [finished[request_id] for request_id in ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, yielding each request's output whenever it has grown; the last of each has `finished` set.

        With `best_of` there is nothing to show before the end: which ones are best is not known.
        """
        batch = _prompt_list(prompts)
        ids = self._add_batch(batch, _params_list(sampling_params, len(batch)))
        for found in self._drive(ids):
            for news in found:
                if news.presentable:
                    yield news.output()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's chat template."""
        extra = dict(chat_template_kwargs or {})
        taken = extra.keys() & {"messages", "tools", "add_generation_prompt"}
        if taken:
            raise InvalidRequestError(f"chat_template_kwargs may not hold {min(taken)!r}: it is an argument of chat",
                                      field="chat_template_kwargs")
        prompts = [
            self.chat_prompt(conversation, add_generation_prompt=add_generation_prompt, tools=tools, **extra)
            for conversation in _conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **kwargs: Any) -> dict[str, Any]:
        """A conversation as a prompt for `generate`, `stream` or `add_request`.

        The template writes the special tokens that it wants; the tokenizer does not add its own on top.
        """
        return {"prompt": self.render_chat(messages, **kwargs), "add_special_tokens": False}

    def render_chat(self, messages: Sequence[Message], **kwargs: Any) -> str:
        """The prompt that the model's chat template makes of a conversation."""
        if self.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer (skip_tokenizer_init): chat needs one",
                                      field="messages")
        return self.tokenizer.apply_chat_template(messages, **kwargs)

    # ---- driving the loop by hand

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrival_time: float | None = None,
        prefill: Sequence[str] | None = None,
    ) -> None:
        """Queue a request; `step` brings its outputs. Refused requests raise and leave no trace.

        `prefill`: addresses of engines that are asked for the prompt, in this order (`kv_role` "decode"); [] computes
        it here, and without a word those of `kv_peers` are asked.

        A lower `priority` goes first where scheduling_policy is "priority", and is preempted last under any policy;
        `tenant` is whom scheduling_policy "fair" is fair to.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError("request_id must be a non-empty string", field="request_id")
        self._queue(request_id, prompt, sampling_params, priority, tenant, arrival_time, cache_salt, prefill)

    def _queue(
        self, request_id: str, prompt: Prompt, sampling_params: Params | None, priority: int, tenant: str | None,
        arrival_time: float | None, cache_salt: str | None = None, prefill: Sequence[str] | None = None,
    ) -> int:  # fmt: skip
        """The tokens of its prompt."""
        params = SamplingParams() if sampling_params is None else sampling_params
        request, text = self._inputs.request(request_id, prompt, params, priority=priority, cache_salt=cache_salt,
                                             tenant=tenant, arrival_time=arrival_time)
        self._check_shape(request.params)
        self._ask_others(request, prefill)
        self._core.add(request)
        self._streams.add(request, text)
        return len(request.prompt_token_ids)

    def _ask_others(self, request: Request, prefill: Sequence[str] | None) -> None:
        peers = self._running_engine.peers
        if peers is not None:
            peers.prepare(request, prefill)
        elif prefill:
            raise InvalidRequestError("prefill names engines to ask for the prompt, which needs kv_role 'decode' or "
                                      "'both'", field="prefill")

    def _check_shape(self, params: SamplingParams) -> None:
        """Refuse an invalid grammar here; valid ones are compiled beside the steps."""
        from quire.structured.compiler import GrammarCompiler

        if params.structured_outputs is not None and isinstance(self._core.grammars, GrammarCompiler):
            self._core.grammars.check(params.structured_outputs)

    def step(self, *, until_done: Container[str] = ()) -> list[RequestOutput]:
        """Run one engine step; outputs of the requests that have news. Of those in `until_done` only the end is."""
        held_back, self._held_back = self._held_back, []
        return held_back + [news.output() for news in self._step(until_done) if news.presentable]

    def _step(self, until_done: Container[str] = ()) -> list[News]:
        found = self._streams.process(self._core.step(), until_done)
        for news in found:
            for seq, text in news.stopped:
                self._core.finish(seq, FinishReason.STOP, text)
        return found

    def abort(self, request_id: str | Sequence[str]) -> None:
        """Stop requests, wherever they are; unknown ids are ignored. `step` still reports each one's end."""
        names = [request_id] if isinstance(request_id, str) else request_id
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise InvalidRequestError("abort takes a request id or a list of them", field="request_id")
        for name in names:
            self._core.abort(name)

    # ---- for other engines

    @property
    def kv_address(self) -> str | None:
        """Where other engines reach this one, for their `prefill` or `kv_peers`; None unless it computes for others."""
        peers = self._running_engine.peers
        if peers is None or peers.listener is None:
            return None
        host, port = peers.listener.address
        return f"kv://[{host}]:{port}" if ":" in host else f"kv://{host}:{port}"

    def serve_peers(self, until: threading.Event) -> None:
        """Compute prompts for other engines until the event is set, on this thread, as `quire serve` does by itself."""
        core = self._core
        while not until.is_set():
            self._held_back += [news.output() for news in self._step() if news.presentable]
            if not core.has_work:
                core.executor.arrivals.wait(0.05)

    def has_unfinished_requests(self) -> bool:
        return self._core.has_work or bool(self._held_back)

    # ---- looking after it

    def metrics(self) -> dict[str, int | float]:
        """Counters and gauges, flat: tokens, steps, preemptions, prefix hits, blocks by state, queue lengths."""
        self._core.take_arrivals()
        core = self._core
        return flat_metrics(core.scheduler, self._running_engine.pool, core.executor.expert_load(),
                            core.executor.describe_ranks())

    def trace(self, path: str | Path) -> StepTrace:
        """Record the timeline of steps into a file for Perfetto or chrome://tracing.

        Who ran how many tokens, block copies, preemptions and why, blocks by state. The file is up to date whenever
        the engine is idle; recording ends when the returned object is closed, as `with llm.trace("file.json"):` does,
        or the LLM is.
        """
        if self._core.trace is not None:
            raise EngineError("a trace is being recorded: close it before the next one")
        return StepTrace(self._core, path)

    def clear_prefix_cache(self) -> int:
        """Evict cached prefixes that no sequence uses; returns the number of blocks freed."""
        return self._core.clear_prefix_cache()

    def check(self) -> None:
        """Verify the engine's bookkeeping; raises InvariantError where it contradicts itself.

        In a process of its own an engine does so by itself while it has nothing to do. Here it has only the moments
        before a batch, if it was not examined lately, and calls of `step` without requests, and takes less than a
        millisecond of each.
        """
        self._core.scheduler.check()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._engine is not None:
            self._engine.core.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # ---- inside

    @property
    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("this LLM is closed: make a new one")
        return self._engine

    @property
    def _core(self) -> EngineCore:
        return self._running_engine.core

    def _add_batch(self, prompts: list[Prompt], params: Sequence[Params], priorities: list[int] | None = None,
                   tenants: Sequence[str | None] | None = None) -> list[str]:
        """Add all or none: when one is refused, those before it are taken back. A step begins as soon as there are
        tokens enough to fill it, where the order in which requests come is the order in which they are served."""
        self._core.self_check.glance()
        ids: list[str] = []
        ordered = (self.config.scheduler.scheduling_policy, self.config.scheduler.batching_policy)
        begins = self._core.overlaps and ordered == ("fcfs", "decode-first")
        step_tokens = self._core.scheduler.limits.max_num_batched_tokens
        queued = 0
        arrival = time.time()
        priorities = [0] * len(prompts) if priorities is None else priorities
        tenants = [None] * len(prompts) if tenants is None else tenants
        try:
            for index, (prompt, each, priority, tenant) in enumerate(
                    zip(prompts, params, priorities, tenants, strict=True)):
                request_id = self._fresh_id()
                try:
                    queued += self._queue(request_id, prompt, each, priority, tenant, arrival)
                except InvalidRequestError as error:
                    if len(prompts) > 1:
                        error.args = (f"prompt {index}: {error}",)
                    raise
                ids.append(request_id)
                if begins and queued >= step_tokens:
                    self._core.launch()
                    queued -= step_tokens
        except BaseException:
            self._withdraw(ids)
            raise
        return ids

    def _fresh_id(self) -> str:
        """An id that no request of the caller's own has."""
        while True:
            name = f"q{next(self._ids)}"
            if not self._streams.waits_for(name):
                return name

    def _drive(self, ids: Sequence[str], until_done: bool = False) -> Generator[list[News], None, None]:
        """Step until all of `ids` are finished; their news, step by step, or (`until_done`) only what may be their
        end: then the caller looks for Ctrl-C. Outputs of other requests wait for their owner's next `step`."""
        unfinished = set(ids)
        try:
            while unfinished:
                with nullcontext() if until_done else DeferredInterrupt():
                    found = self._step(unfinished if until_done else ())
                mine = []
                for news in found:
                    if news.processor.request_id in unfinished:
                        mine.append(news)
                    elif news.presentable:
                        self._held_back.append(news.output())
                unfinished.difference_update([news.processor.request_id for news in mine if news.finished])
                yield mine
            self._core.settle()
        finally:
            if unfinished and self._engine is not None:
                self._withdraw(list(unfinished))

    def _withdraw(self, ids: list[str]) -> None:
        """Abort requests whose caller is gone; news of others is kept for theirs."""
        self.abort(ids)
        for news in self._streams.process(self._core.take_updates()):
            if news.processor.request_id not in ids and news.presentable:
                self._held_back.append(news.output())


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidRequestError(
            f"prompts must be a string, a list of token ids or a list of those, not {type(prompts).__name__}",
            field="prompts")
    if prompts and all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompts):
        return [list(prompts)]
    return list(prompts)


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequestError("sampling_params must be a SamplingParams or a list of them", field="sampling_params")
    if len(params) != count:
        raise InvalidRequestError(
            f"there are {count} prompts but {len(params)} sampling_params: give one for all, or one for each",
            field="sampling_params")
    return list(params)


def _priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or isinstance(priority, str):
        raise InvalidRequestError("priority must be a list with one integer per prompt", field="priority")
    if len(priority) != count:
        raise InvalidRequestError(f"there are {count} prompts but {len(priority)} priorities", field="priority")
    return list(priority)


def _tenants(tenant: str | Sequence[str] | None, count: int) -> list[str | None]:
    if tenant is None or isinstance(tenant, str):
        return [tenant] * count
    if not isinstance(tenant, Sequence):
        raise InvalidRequestError("tenant must be a string or a list of strings", field="tenant")
    if len(tenant) != count:
        raise InvalidRequestError(f"there are {count} prompts but {len(tenant)} tenants", field="tenant")
    return list(tenant)


def _conversations(messages: Any) -> list[Sequence[Message]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a list of messages, or a list of such lists", field="messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)
