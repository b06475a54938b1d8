"""Talks with a model: answers appear as they are made, and the model remembers what was said.

Ctrl-C stops an answer, Ctrl-D or /exit ends the chat. A line that ends in a backslash goes on in the next
one; three double quotes open and close a text of several lines. /help lists the commands."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from quire.cli.conversation import Conversation
from quire.cli.engine import open_llm
from quire.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_params
from quire.cli.remote import add_endpoint_options
from quire.cli.talk import DEFAULTS, Talk
from quire.cli.terminal import LiveText
from quire.errors import ChatTemplateError, InvalidRequestError

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.sampling.params import SamplingParams

EXAMPLES = (
    "examples:\n"
    "  quire chat\n"
    "  quire chat smollm2-135m --system 'You answer in one sentence.'\n"
    "  quire chat ./my-model --temperature 0.8 --max-tokens 1000\n"
    "  quire chat --url http://127.0.0.1:8000"
)
DEFAULT_MODEL = "smollm2-135m"
UNUSED = ("n", "best_of", "logprobs", "prompt_logprobs", "detokenize")
"""What a chat has no place to show, or cannot do without."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="alias, path or hub id (default: smollm2-135m); with --url, the model to ask the server for",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_endpoint_options(parser, url_default=None)
    add_sampling_options(parser, DEFAULTS, leave_out=UNUSED)
    add_engine_options(parser, leave_out=("model", "skip_tokenizer_init"), rename={"seed": "--engine-seed"})


def run(args: argparse.Namespace) -> int:
    if args.url is not None:
        from quire.cli.remote_chat import chat_with_server

        return chat_with_server(args)
    params = sampling_params(args, DEFAULTS)
    model = args.model or DEFAULT_MODEL
    with open_llm({"model": model, **engine_options(args)}) as llm:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ChatTemplateError(
                f"{model} has no chat template, so it was not made for chats (a base model, perhaps): "
                f"complete texts with `quire generate --model {model}` instead"
            )
        return Chat(llm, params, args.system).talk()


class Chat(Talk):
    """With a model of ours, in this process."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        super().__init__(system)

    def _begin(self, system: str | None) -> Any:
        return Conversation(self._llm, system)

    def _max_tokens(self) -> int | None:
        return self._params.max_tokens

    def _context(self) -> str:
        return f"the context of {self._llm.max_model_len:,} tokens"

    def _stream(self, prompt: Any) -> tuple[str, str | None]:
        answer, note = "", None
        try:
            with LiveText(status=False) as screen, \
                 contextlib.closing(self._llm.stream(prompt, self._params)) as outputs:  # type: ignore[type-var]
                for output in outputs:
                    answer = output.outputs[0].text
                    screen.write(output.outputs[0].text_delta)
            if output.error is not None:
                self._failed, note = True, f"(the answer failed: {output.error})"
            elif output.outputs[0].finish_reason == "length":
                note = "(cut off: --max-tokens, or the end of the context)"
        except InvalidRequestError as error:
            self._failed, note = True, f"({error})"
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            note = "(stopped)"
        return answer, note
