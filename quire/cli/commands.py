"""The commands of `quire` by name; each one's module and parser are made only when it is asked for."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.errors import QuireError


@dataclass(frozen=True, slots=True)
class Command:
    """A line of `quire --help`: a module with `add_arguments(parser)` and `run(args)`, or `children`."""

    module: str
    summary: str
    children: Mapping[str, Command] | None = None


BENCHES: dict[str, Command] = {
    "cpu": Command("quire.bench.cpu.command", "cases A to D on a CPU, in turns with other engines"),
    "accuracy": Command("quire.bench.accuracy",
                        "what formats of weights cost in accuracy, against float32 on a CPU, bf16 on a GPU"),
    "scheduler": Command("quire.bench.scheduling.scheduler", "time to plan a step of 16 to 1,024 sequences"),
    "prefix-cache": Command("quire.bench.kv.prefix_cache", "hit rates of the eviction policies on a trace"),
    "policies": Command("quire.bench.scheduling.policies",
                        "one workload through each way of batching: throughput and latency"),
    "gpu": Command("quire.bench.gpu.command", "cases a to d on a GPU, against what the hardware allows"),
    "serve": Command("quire.bench.serving.serve", "load on a server of the OpenAI API: throughput, latency, goodput"),
    "structured": Command("quire.bench.serving.structured", "answers in the shape of a JSON schema against free ones"),
    "async": Command("quire.bench.serving.async_engine", "the engine in its own process: streamed tokens per second"),
    "http": Command("quire.bench.serving.http",
                    "what serving costs: HTTP against the engine, an instant model, long prompts"),
    "route": Command("quire.bench.routing.route",
                     "prefixes that a router finds on a trace, and what passing through it costs"),
    "view": Command("quire.bench.serving.view", "what it costs the engine to be watched on the page"),
    "parallel": Command("quire.bench.ranks.parallel", "one model over several ranks: reaching them, and speed"),
    "soak": Command("quire.bench.soak.command",
                    "mixed requests, hang-ups, bad input, killed engines; then a look for damage"),
    "speculative": Command("quire.bench.speculation.command", "one stream with drafts against the same without"),
    "pressure": Command("quire.bench.scheduling.pressure",
                        "KV pools too small for the load, in each mode of preemption"),
    "kv-benefit": Command("quire.bench.kv.benefit", "when a pool is faster than computing, by network and prompt"),
    "pool": Command("quire.bench.kv.pool", "replicas with a KV pool against replicas without, on a trace"),
    "transfer": Command("quire.bench.kv.transfer", "KV from one process into another's blocks, by each transport"),
    "disaggregated": Command("quire.bench.kv.disaggregated", "long prompts among streams, in chunks or elsewhere"),
    "offload": Command("quire.bench.kv.offload", "streams that go on while a long prefix comes back from the host"),
}
TRAININGS: dict[str, Command] = {
    "eagle": Command("quire.cli.train_eagle", "a head that guesses the model's next tokens, from its own answers"),
}
COMMANDS: dict[str, Command] = {
    "demo": Command("quire.cli.demo", "fetch the default model and let it answer three questions"),
    "generate": Command("quire.cli.generate", "complete prompts, or answer them"),
    "serve": Command("quire.cli.serve", "answer OpenAI's and Anthropic's APIs on a port of this machine"),
    "route": Command("quire.cli.route", "one address in front of many servers: who holds the prompt answers it"),
    "chat": Command("quire.cli.chat", "talk with a model in the terminal"),
    "complete": Command("quire.cli.complete", "complete a text through a server"),
    "run-batch": Command("quire.cli.run_batch", "answer an OpenAI batch file; goes on where it was stopped"),
    "pull": Command("quire.cli.pull", "download a model, so that it is there when needed"),
    "models": Command("quire.cli.models", "models known by a short name, and what is on this machine"),
    "inspect": Command("quire.cli.inspect", "what a model is and what of it fits in this machine"),
    "env": Command("quire.cli.env", "versions, processor, memory and kernels, for a bug report"),
    "bench": Command("quire.cli.bench", "measure speed; one JSON line per case", BENCHES),
    "train": Command("quire.cli.train", "train what makes a model faster", TRAININGS),
    "eval": Command("quire.eval.command", "accuracy on LAMBADA, ARC or GSM8K"),
    "fuzz": Command("quire.cli.fuzz", "look for workloads whose tokens differ from the plain path's"),
    "completion": Command("quire.cli.completion", "print a completion script for bash, zsh or fish"),
}


class UsageError(QuireError):
    """The command line itself is wrong: exit code 2."""


class CommandParser(argparse.ArgumentParser):
    """argparse, but a mistake is one line that says where help is."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` explains)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions and examples as they are written, and room for the names of long options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)


def find(name: str, among: Mapping[str, Command], prog: str) -> Command:
    """The command of a name; a mistyped one raises with the nearest that exists."""
    if name in among:
        return among[name]
    near = difflib.get_close_matches(name, among, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(among)}"
    raise UsageError(f"{prog} has no command {name!r}: {hint}")


def load(command: Command, prog: str) -> Any:
    """The command's module. One that is missing or broken harms no other command."""
    try:
        return importlib.import_module(command.module)
    except ImportError as error:
        raise QuireError(f"`{prog}` cannot run in this installation: {error}") from error


def make_parser(module: Any, prog: str) -> CommandParser:
    """The command's parser: described by its module's docstring, with its `EXAMPLES` at the end."""
    parser = CommandParser(
        prog=prog,
        description=_description(module.__doc__ or ""),
        epilog=getattr(module, "EXAMPLES", None),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show a traceback when something fails")
    module.add_arguments(parser)
    # argparse would list every flag here, a screenful of them, before it lists them again with their meaning.
    parser.usage = " ".join([prog, "[options]", *_places(parser)]).replace("%", "%%")
    return parser


def _places(parser: argparse.ArgumentParser) -> list[str]:
    """The positional arguments as a usage line shows them."""
    places = []
    for action in parser._get_positional_actions():
        name = str(action.metavar or action.dest)
        places.append(
            {"*": f"[{name} ...]", "+": f"{name} ...", "?": f"[{name}]"}.get(str(action.nargs), name)
        )
    return places


def _description(docstring: str) -> str:
    """The docstring without the command's name in front, which the usage line has said."""
    head, colon, rest = docstring.strip().partition(": ")
    text = rest if colon and head.startswith("`quire") else docstring.strip()
    return text[:1].upper() + text[1:]


def overview(prog: str, intro: str, among: Mapping[str, Command], outro: str) -> str:
    """The help of a command that has commands below it."""
    width = max(map(len, among)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in among.items()]
    return "\n".join([f"usage: {prog} COMMAND [options]", "", intro, "", "commands:", *lines, "", outro])


def dispatch(argv: Sequence[str]) -> tuple[Any, argparse.Namespace] | str:
    """What `argv` asks for: a module with its parsed arguments, or a text to print."""
    words, among, prog, verbose = list(argv), COMMANDS, "quire", False
    parent: Command | None = None
    while True:
        while words and words[0] in ("-v", "--verbose"):
            verbose, words = True, words[1:]
        if not words or words[0] in ("-h", "--help"):
            return _help(prog, among, parent)
        if prog == "quire" and words[0] == "--version":
            from quire import __version__

            return f"quire {__version__}"
        if words[0].startswith("-"):
            raise UsageError(f"{words[0]} comes after a command, or is unknown: `{prog} --help` explains")
        command, prog = find(words[0], among, prog), f"{prog} {words[0]}"
        words = words[1:]
        if command.children is None:
            module = load(command, prog)
            args = make_parser(module, prog).parse_args(words)
            args.verbose = args.verbose or verbose
            return module, args
        parent, among = command, dict(command.children)


def _help(prog: str, among: Mapping[str, Command], parent: Command | None) -> str:
    if parent is not None:
        module = importlib.import_module(parent.module)
        return overview(prog, module.INTRO, among, module.EXAMPLES)
    return overview(
        prog,
        "Quire runs language models on this machine: paged KV cache, continuous batching, the same tokens\n"
        "whatever the batch.",
        among,
        "`quire COMMAND --help` explains each of them, with examples. Start with:\n\n"
        "  quire demo\n"
        '  quire generate "The capital of France is"\n'
        "  quire chat\n\n"
        "options:\n"
        "  -h, --help      this text\n"
        "  --version       the version\n"
        "  -v, --verbose   show a traceback when something fails",
    )


def all_parsers() -> dict[str, CommandParser]:
    """The parser of every command that can be loaded, by the words that lead to it ("bench cpu")."""
    found: dict[str, CommandParser] = {}
    for name, command in COMMANDS.items():
        for words, leaf in _leaves(name, command):
            try:
                found[words] = make_parser(load(leaf, f"quire {words}"), f"quire {words}")
            except Exception as error:
                print(f"quire: note: {words} is left out: {error}", file=sys.stderr)
    return found


def _leaves(name: str, command: Command) -> list[tuple[str, Command]]:
    if command.children is None:
        return [(name, command)]
    return [leaf for child, below in command.children.items() for leaf in _leaves(f"{name} {child}", below)]
