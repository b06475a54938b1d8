"""Continues a text through a server of the OpenAI API, such as `quire serve`, and writes it as it comes.

A prompt `-` is read from standard input."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from quire.cli.options import add_sampling_options, read_text
from quire.cli.remote import NOT_REMOTE, add_endpoint_options, endpoint_of, request_fields, text_pieces
from quire.cli.terminal import DIM, LiveText, printable, styled

EXAMPLES = (
    "examples:\n"
    '  quire complete "The capital of France is"\n'
    "  quire complete --url http://10.0.0.7:8000 --api-key $KEY --max-tokens 100 - < letter.txt"
)
DEFAULTS: dict[str, Any] = {"max_tokens": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads standard input")
    add_endpoint_options(parser)
    add_sampling_options(parser, DEFAULTS, leave_out=NOT_REMOTE)


def run(args: argparse.Namespace) -> int:
    prompt = read_text(args.prompt) if args.prompt == "-" else args.prompt
    body = {"prompt": prompt, **request_fields(args, DEFAULTS)}
    ending: dict[str, Any] = {}
    chunks = endpoint_of(args).stream("/v1/completions", body)
    with LiveText(status=False) as screen, contextlib.closing(chunks):  # type: ignore[type-var]
        for text in text_pieces(chunks, ending):
            screen.write(printable(text))
    if ending["finish_reason"] == "length" and sys.stdout.isatty():
        print(styled("(cut off: --max-tokens, or the end of the context)", DIM, sys.stdout))
    return 0
