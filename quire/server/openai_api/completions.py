"""/v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.engine.outputs.output import CompletionOutput, RequestOutput
from quire.server.answer import Answer, encode, finish_reason, new_logprobs, sse
from quire.server.api_error import refusal
from quire.server.generation import Work
from quire.server.openai_api.logprobs import CompletionLogprobs, joined
from quire.server.openai_api.parameters import Wishes, engine_params, shape_of
from quire.server.openai_api.protocol import CompletionBody
from quire.server.service import RequestRecord, Service, salt_of

_DEFAULT_TOKENS = 16


async def completion(service: Service, record: RequestRecord, body: CompletionBody) -> Answer:
    """The answer to a request; raises ApiError or InvalidRequestError where there can be none."""
    service.check_model(body.model)
    if body.suffix:
        raise refusal("suffix", "is not supported: this server only continues texts", code="unsupported_parameter")
    max_tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise refusal("max_tokens", "may be 0 only with echo")
    # A score is asked for without an output: one token is drawn, and not shown.
    shape = shape_of(body, service.config)
    wishes = Wishes(max_tokens=max(max_tokens, 1), best_of=body.best_of, logprobs=body.logprobs,
                    shape=None if shape is None else shape[1],
                    prompt_logprobs=body.logprobs if body.echo else None)
    params = engine_params(body, wishes, service.config)
    texts, prompts = await _prompts(service, body, record.tenant)
    for tokens in prompts:
        service.check_length(len(tokens), max_tokens, "prompt")
    field = None if shape is None else shape[0]
    work = Work(f"cmpl-{record.unique_id}", prompts, params, body.priority or 0, record.tenant,
                salt_of(record.tenant, body.cache_salt), service.timeout(body.timeout), field, bool(body.stream),
                prefill=record.prefill)
    return CompletionAnswer(service, record, work, body, texts, shows_output=max_tokens > 0)


async def _prompts(service: Service, body: CompletionBody,
                   tenant: str | None) -> tuple[list[str | None], list[list[int]]]:
    """The prompts as texts, where they are echoed or were given so, and as token ids."""
    given = body.prompt if body.prompt_token_ids is None else body.prompt_token_ids
    if given is None or (body.prompt is not None and body.prompt_token_ids is not None):
        raise refusal("prompt", "or prompt_token_ids is wanted, and not both")
    several: list[Any] = given if isinstance(given, list) and (not given or not isinstance(given[0], int)) else [given]
    if not several or any(not prompt for prompt in several):
        raise refusal("prompt", "is empty: give at least one character or token")
    if len(several) > service.config.max_prompts:
        raise refusal("prompt", f"holds {len(several)} prompts; this server takes at most {service.config.max_prompts}")
    special = body.add_special_tokens is not False
    if isinstance(several[0], str):
        return list(several), await service.encode_prompts(several, "prompt", special, tenant)
    texts: list[str | None] = [None] * len(several)
    if body.echo and service.tokenizer is not None:
        for place, prompt in enumerate(several):
            service.check_length(len(prompt), 0, "prompt")
            texts[place] = await service.decode(prompt, False, tenant)
            await asyncio.sleep(0)
    return texts, several


class CompletionAnswer(Answer):
    def __init__(self, service: Service, record: RequestRecord, work: Work, body: CompletionBody,
                 texts: list[str | None], shows_output: bool) -> None:
        super().__init__(service, record, work, stream=bool(body.stream), options=body.stream_options)
        self._body = body
        self._texts = texts
        self._shows_output = shows_output
        self._n = body.n or 1
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()
        head = {"id": work.request_id, "object": "text_completion", "created": self.created,
                "model": service.model_name}
        self._head = head
        self._plain = body.logprobs is None and not body.echo and not body.return_token_ids and not self.include_usage
        # A chunk of plain text differs from the next only in its text and its choice's number.
        self._chunk_start = b"data: " + encode(head)[:-1] + b',"choices":[{"index":%d,"text":'
        self._chunk_end = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def usage_body(self) -> dict[str, Any]:
        return self.usage.body(self._shows_output)

    def events(self, place: int, output: RequestOutput) -> bytes:
        found = b""
        for each in output.outputs[:self._n]:
            number = place * self._n + each.index
            if self._plain and each.text_delta and each.finish_reason is None:
                found += self._chunk_start % number + encode(each.text_delta) + self._chunk_end
            else:
                found += self._event(place, number, output, each)
        return found

    def _event(self, place: int, number: int, output: RequestOutput, each: CompletionOutput) -> bytes:
        first = number not in self._echoed
        text = each.text_delta if self._shows_output else ""
        if first and self._body.echo:
            text = (self._texts[place] or "") + text
        reason = finish_reason(each)
        told = self._body.logprobs is not None or self._body.return_token_ids
        if not text and reason is None and not (told and each.token_ids_delta):
            return b""
        self._echoed.add(number)
        choice: dict[str, Any] = {"index": number, "text": text,
                                  "logprobs": self._piece(place, number, output, new_logprobs(each), first),
                                  "finish_reason": reason}
        if self._body.return_token_ids:
            choice["token_ids"] = each.token_ids_delta if self._shows_output else []
            choice |= {"prompt_token_ids": output.prompt_token_ids} if first else {}
        return sse({**self._head, "choices": [choice], **self.chunk_usage()})

    def _piece(self, place: int, number: int, output: RequestOutput, positions: list[Any],
               first: bool) -> dict[str, Any] | None:
        """Log-probabilities, those of the echoed prompt before the first ones."""
        if self._body.logprobs is None:
            return None
        if number not in self._logprobs:
            self._logprobs[number] = CompletionLogprobs(self._body.logprobs, self.service.tokenizer)
        writer = self._logprobs[number]
        prompt = None
        if first and self._body.echo:
            prompt = writer.prompt(output.prompt_token_ids, output.prompt_logprobs or [])
        piece = writer.piece(positions if self._shows_output else [])
        return piece if prompt is None else joined(prompt, piece)

    def last_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, found: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for place, output in enumerate(found):
            for each in output.outputs[:self._n]:
                number = place * self._n + each.index
                text = each.text if self._shows_output else ""
                choice = {"index": number, "text": (self._texts[place] or "") + text if self._body.echo else text,
                          "logprobs": self._piece(place, number, output, each.logprobs or [], True),
                          "finish_reason": finish_reason(each)}
                if self._body.return_token_ids:
                    choice["token_ids"] = each.token_ids if self._shows_output else []
                    choice["prompt_token_ids"] = output.prompt_token_ids
                choices.append(choice)
        return {**self._head, "choices": choices, "usage": usage}
