"""Command-line flags derived from the engine's options and from SamplingParams, and read back."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from quire.config import option_fields
from quire.errors import ConfigError
from quire.sampling.params import SamplingParams

ENGINE_PREFIX = "engine:"
SAMPLING_PREFIX = "sampling:"
"""Parsed values go by these names in the namespace, so that the two seeds do not meet."""

_GROUP_TITLES = {"model": "model", "cache": "KV cache", "scheduler": "scheduling",
                 "speculation": "speculation", "structured": "structured output",
                 "parallel": "parallelism"}

SAMPLING_HELP = {
    "n": "answers for each prompt",
    "best_of": "draw this many and keep the n likeliest",
    "temperature": "how far to stray from the likeliest token; 0 is greedy",
    "top_p": "draw from the likeliest tokens that together have this probability",
    "top_k": "draw from this many likeliest tokens (0: all)",
    "min_p": "drop tokens less likely than this share of the likeliest one",
    "repetition_penalty": "above 1 makes tokens that occurred, prompt included, less likely",
    "presence_penalty": "subtracted from the logit of every token already generated",
    "frequency_penalty": "the same, times how often it was",
    "seed": "draw the same tokens again (default: one drawn from the engine's seed)",
    "max_tokens": "most tokens to generate",
    "min_tokens": "fewest tokens before an end is allowed",
    "stop": "end when this text appears; may be given several times",
    "stop_token_ids": "end at these tokens, as in 0,2",
    "include_stop_str_in_output": "keep the stop text in the output",
    "ignore_eos": "go on after the model's end-of-text token",
    "logprobs": "report log-probabilities of this many likeliest tokens at each position (with --json)",
    "prompt_logprobs": "the same for the prompt's tokens (with --json)",
    "logit_bias": "add to tokens' logits, as in 42=1.5,7=-100",
    "bad_words": "never generate this text; may be given several times",
    "allowed_token_ids": "draw from these tokens only, as in 10,11,12",
    "skip_special_tokens": "leave special tokens out of the text",
    "detokenize": "turn tokens into text",
    "structured_outputs": "the shape of the answer",
}


SHAPE_FLAGS = {
    "json": ("--json-schema", "SCHEMA", "the answer is JSON of this schema, given as text or as @FILE"),
    "json_object": ("--json-object", None, "the answer is a JSON object"),
    "regex": ("--regex", "REGEX", "the answer matches this regular expression"),
    "choice": ("--choice", "TEXT", "the answer is this text, or another given so; give it several times"),
    "grammar": ("--grammar", "EBNF", "the answer follows this EBNF grammar, given as text or as @FILE"),
    "structural_tag": ("--structural-tag", "JSON", "the answer follows this structural tag, given as text or as @FILE"),
}
"""Flags of the fields of StructuredOutputs."""
_SHAPE = "structured_outputs"


def add_engine_options(
    parser: argparse.ArgumentParser,
    *,
    leave_out: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
) -> None:
    """A flag for every option of `quire.config`, grouped by section; `rename` gives one another flag."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for section, f in option_fields():
        if f.name in leave_out:
            continue
        if section not in groups:
            groups[section] = parser.add_argument_group(_GROUP_TITLES.get(section, section))
        _add_option(groups[section], ENGINE_PREFIX, f, (rename or {}).get(f.name, flag_of(f.name)))


def add_options_of(parser: argparse.ArgumentParser, title: str, prefix: str,
                   fields: Iterable[dataclasses.Field[Any]]) -> None:
    """A flag for each option among `fields`, in a group of their own."""
    group = parser.add_argument_group(title)
    for f in fields:
        _add_option(group, prefix, f, flag_of(f.name))


def options_of(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The options of `add_options_of` that were given."""
    return _given(args, prefix)


def _add_option(group: argparse._ArgumentGroup, prefix: str, f: dataclasses.Field[Any], flag: str) -> None:
    _add(group, prefix + f.name, flag, str(f.type), _with_default(f.metadata["help"], f.default),
         f.metadata.get("choices"))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, as keywords of `LLM`; the others keep their defaults."""
    return _given(args, ENGINE_PREFIX)


def add_sampling_options(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any], *, leave_out: Collection[str] = ()
) -> None:
    """A flag for every field of SamplingParams; `defaults` are those of the command where they differ."""
    group = parser.add_argument_group("sampling")
    for f in dataclasses.fields(SamplingParams):
        if f.name in leave_out:
            continue
        if f.name == _SHAPE:
            _add_shape_options(parser)
            continue
        default = defaults.get(f.name, f.default)
        text = _with_default(SAMPLING_HELP.get(f.name, ""), default)
        _add(group, SAMPLING_PREFIX + f.name, flag_of(f.name), str(f.type), text, None)


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    given = {**defaults, **_given(args, SAMPLING_PREFIX)}
    shape = {name: given.pop(f"{_SHAPE}.{name}") for name in SHAPE_FLAGS if f"{_SHAPE}.{name}" in given}
    if shape:
        given[_SHAPE] = shape
    return SamplingParams(**given)


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shape of the answer (one of them)")
    for name, (flag, metavar, text) in SHAPE_FLAGS.items():
        dest = f"{SAMPLING_PREFIX}{_SHAPE}.{name}"
        common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": text}
        if metavar is None:
            group.add_argument(flag, action="store_true", **common)
        elif name == "choice":
            group.add_argument(flag, action="append", metavar=metavar, **common)
        else:
            group.add_argument(flag, type=str if name == "regex" else text_or_file, metavar=metavar, **common)


def text_or_file(value: str) -> str:
    """The value itself, or the content of FILE for @FILE."""
    return read_text(value[1:]) if value.startswith("@") else value


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _given(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def _with_default(text: str, default: Any) -> str:
    if default is None or "default:" in text:
        return text
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    return f"{text} (default: {shown})".replace("%", "%%")


def _add(
    group: argparse._ArgumentGroup,
    dest: str,
    flag: str,
    kind: str,
    text: str,
    choices: tuple[str, ...] | None,
) -> None:
    """One flag of the kind that a field's annotation says; absent from the namespace unless given."""
    common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": text}
    base = kind.removesuffix(" | None")
    if base == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif choices:
        group.add_argument(flag, choices=choices, **common)
    elif base.startswith("dict"):
        group.add_argument(flag, type=json_object, metavar="JSON", **common)
    elif "Mapping" in base:
        group.add_argument(flag, type=token_biases, metavar="ID=BIAS,...", **common)
    elif base == "Sequence[int]":
        group.add_argument(flag, type=token_list, metavar="IDS", **common)
    elif "Sequence[str]" in base:
        group.add_argument(flag, action="append", metavar="TEXT", **common)
    else:
        read, metavar = _scalar(base)
        group.add_argument(flag, type=read, metavar=metavar, **common)


def _scalar(kind: str) -> tuple[Callable[[str], Any], str]:
    if kind == "int":
        return integer, "N"
    if kind == "float":
        return number, "X"
    return str, "SIZE" if kind == "int | str" else "NAME"


def integer(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number is wanted, not {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number is wanted, not {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"JSON is wanted, as in {{\"method\": \"ngram\"}}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is wanted, not {text!r}")
    return value


def token_list(text: str) -> list[int]:
    return [integer(part) for part in text.split(",") if part.strip()]


def token_biases(text: str) -> dict[int, float]:
    biases: dict[int, float] = {}
    for part in text.split(","):
        token, equals, bias = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"token=bias is wanted, as in 42=1.5, not {part!r}")
        biases[integer(token)] = number(bias)
    return biases


def read_text(path: str) -> str:
    """A file of UTF-8 text, or standard input for `-`."""
    import sys

    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        shown = "standard input" if path == "-" else path
        raise ConfigError(f"{shown} is not UTF-8 text (byte {error.start}): convert it first") from None
