"""Talks with a model: answers appear as they are made, and the model remembers what was said.

Ctrl-C stops an answer, Ctrl-D or /exit ends the chat. A line that ends in a backslash goes on in the next
one; three double quotes open and close a text of several lines. /help lists the commands."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from quire.cli.conversation import Conversation
from quire.cli.engine import open_llm
from quire.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_params
from quire.cli.remote import add_endpoint_options
from quire.cli.terminal import CYAN, DIM, LiveText, styled
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
DEFAULTS: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.2, "top_p": 0.9}
UNUSED = ("n", "best_of", "logprobs", "prompt_logprobs", "detokenize")
"""What a chat has no place to show, or cannot do without."""
COMMANDS = (
    ("/help", "this list"),
    ("/reset", "forget the conversation; the system prompt stays"),
    ("/system TEXT", "set the system prompt and start anew; without TEXT, take it away"),
    ("/exit", "leave (also Ctrl-D)"),
)
PROMPT, CONTINUED, QUOTES = "› ", "… ", '"""'


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


class Chat:
    """The loop of reading a line and answering it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._conversation = self._begin(system)
        self._interactive = sys.stdin.isatty()
        self._failed = False

    def _begin(self, system: str | None) -> Any:
        """A conversation in which nothing was said yet."""
        return Conversation(self._llm, system)

    def talk(self) -> int:
        """Until the input ends; 1 where it was a pipe's and a question of it got no answer."""
        if self._interactive:
            _enable_editing()
            self._note("Ask something. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat.")
        while True:
            try:
                text = self._read()
            except EOFError:
                if self._interactive:
                    print()
                return self._code()
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print()
                self._note("(Ctrl-D or /exit leaves)")
                continue
            if text is None:
                continue
            if text.startswith("/") and "\n" not in text and not self._obey(text):
                return self._code()
            if not text.startswith("/") or "\n" in text:
                self._answer(text)

    def _code(self) -> int:
        return 1 if self._failed and not self._interactive else 0

    def _read(self) -> str | None:
        """A message: a line, lines that end in a backslash, or lines between triple quotes; None if empty."""
        line = self._input(PROMPT)
        if line.strip().startswith(QUOTES):
            return self._read_quoted(line.strip()[len(QUOTES) :]).strip() or None
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._continued() or ""
        return "\n".join([*lines, line]).strip() or None

    def _read_quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            more = self._continued()
            if more is None:
                return "\n".join(lines)
            line = more
        return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)])

    def _continued(self) -> str | None:
        """The next line of a message; None where a pipe ends within it, so that what came is not lost."""
        try:
            return self._input(CONTINUED)
        except EOFError:
            if self._interactive:
                raise
            return None

    def _input(self, prompt: str) -> str:
        if not self._interactive:
            return input()
        if not sys.stdout.isatty():
            return input(prompt)
        # Between \x01 and \x02 is what takes no place on the line, so that editing counts columns right.
        return input(f"\x01\x1b[{CYAN}m\x02{prompt}\x01\x1b[0m\x02")

    def _obey(self, text: str) -> bool:
        """Carry out a command; False when it ends the chat."""
        word, _, rest = text.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/help":
            self._note("\n".join(f"{name:<14}{what}" for name, what in COMMANDS))
        elif word == "/reset":
            self._conversation.reset()
            self._note("(the conversation is forgotten)")
        elif word == "/system":
            self._conversation = self._begin(rest.strip() or None)
            self._note(
                f"(new conversation, system prompt: {rest.strip()})"
                if rest.strip()
                else "(new conversation without a system prompt)"
            )
        else:
            self._note(f"there is no command {word}; /help lists them")
        return True

    def _answer(self, text: str) -> None:
        try:
            prompt, forgotten = self._conversation.ask(text, self._max_tokens())
        except InvalidRequestError as error:
            self._failed = True
            self._note(f"({error})")
            return
        if forgotten:
            self._note(
                f"(the context of {self._llm.max_model_len:,} tokens is full: "
                f"the oldest {forgotten} messages are forgotten)"
            )
        answer, note = self._stream(prompt)
        self._conversation.answered(answer)
        if note:
            self._note(note)

    def _max_tokens(self) -> int | None:
        """Room that an answer may need, where it is known here."""
        return self._params.max_tokens

    def _stream(self, prompt: dict[str, Any]) -> tuple[str, str | None]:
        """Show the answer as it is made; what it is, and what to say about its end."""
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

    def _note(self, text: str) -> None:
        """Something that the model did not say."""
        print(
            styled(text, DIM, sys.stdout) if self._interactive else text,
            file=sys.stdout if self._interactive else sys.stderr,
            flush=True,
        )


def _enable_editing() -> None:
    """Arrow keys and a history of lines, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
