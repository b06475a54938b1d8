"""Prints a script that teaches a shell Quire's commands, flags and model names."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from quire.cli.commands import COMMANDS, CommandParser, all_parsers

EXAMPLES = (
    "examples:\n"
    "  bash:  quire completion bash > ~/.local/share/bash-completion/completions/quire\n"
    "         (or, in ~/.bashrc: source <(quire completion bash))\n"
    "  zsh:   quire completion zsh > ~/.zfunc/_quire     with fpath+=~/.zfunc before compinit\n"
    "  fish:  quire completion fish > ~/.config/fish/completions/quire.fish"
)


@dataclass(frozen=True, slots=True)
class Flag:
    """An option as a shell needs it: its spellings, what it does, whether a value follows, and which."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """What may follow some words: commands with their meaning, flags, and words in place of an argument."""

    commands: Mapping[str, str]
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")


def run(args: argparse.Namespace) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](tree()), end="")
    return 0


def tree() -> dict[str, Node]:
    """Everything there is to complete, by the words typed so far ("", "bench", "bench cpu")."""
    common = (Flag(("-h", "--help"), "show help", False), Flag(("-v", "--verbose"), "show tracebacks", False))
    version = Flag(("--version",), "the version", False)
    nodes = {"": Node({name: command.summary for name, command in COMMANDS.items()}, (*common, version))}
    for name, command in COMMANDS.items():
        if command.children is not None:
            nodes[name] = Node({child: below.summary for child, below in command.children.items()}, common)
    for words, parser in all_parsers().items():
        nodes[words] = Node({}, _flags(parser), _positional_words(parser))
    return nodes


def _flags(parser: CommandParser) -> tuple[Flag, ...]:
    return tuple(
        Flag(
            tuple(action.option_strings), _first_clause(action.help or ""), action.nargs != 0, _values(action)
        )
        for action in parser._actions
        if action.option_strings
    )


def _first_clause(text: str) -> str:
    return text.replace("%%", "%").partition(" (default")[0].partition(";")[0]


def _positional_words(parser: CommandParser) -> tuple[str, ...]:
    return tuple(word for action in parser._actions if not action.option_strings for word in _values(action))


def _values(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if action.metavar == "MODEL" or action.dest.endswith("model"):
        from quire.models.loader.catalog import CATALOG

        return tuple(CATALOG)
    return ()


def bash(nodes: Mapping[str, Node]) -> str:
    """A function that walks the words typed so far; where nothing is known, files are completed."""
    lines = [
        "# completion of quire for bash; made by `quire completion bash`",
        "_quire() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="" path="" known="" word i',
        '  (( COMP_CWORD > 0 )) && prev="${COMP_WORDS[COMP_CWORD-1]}"',
        "  for (( i = 1; i < COMP_CWORD; i++ )); do",
        '    word="${COMP_WORDS[i]}"',
        '    case "$path/$word" in',
        *[f'      {shlex.quote(_key(*_parent(words)))}) path="{words}" ;;' for words in nodes if words],
        "    esac",
        "  done",
        '  case "$path $prev" in',
        *[
            f"    {pattern}) known={shlex.quote(' '.join(flag.values))} ;;"
            for words, node in nodes.items()
            for flag in node.flags
            if flag.takes_value
            for pattern in ["|".join(shlex.quote(f"{words} {name}") for name in flag.names)]
        ],
        '    *) case "$path:$cur" in',
        *[
            f"      {shlex.quote(words + ':')}{pattern}) known={shlex.quote(' '.join(offered))} ;;"
            for words, node in nodes.items()
            for pattern, offered in (("-*", _flag_names(node)), ("*", [*node.commands, *node.words]))
        ],
        "      esac ;;",
        "  esac",
        '  COMPREPLY=( $(compgen -W "$known" -- "$cur") )',
        "}",
        "complete -o default -F _quire quire",
    ]
    return "\n".join(lines) + "\n"


def _parent(words: str) -> tuple[str, str]:
    before, _, last = words.rpartition(" ")
    return before, last


def _key(before: str, last: str) -> str:
    return f"{before}/{last}"


def _flag_names(node: Node) -> list[str]:
    return [name for flag in node.flags for name in flag.names]


def zsh(nodes: Mapping[str, Node]) -> str:
    lines = [
        "#compdef quire",
        "# completion of quire for zsh; made by `quire completion zsh`",
        "_quire() {",
        '  local -a known; local quire_path="" prev="${words[CURRENT-1]}" word i',
        "  for (( i = 2; i < CURRENT; i++ )); do",
        '    word="${words[i]}"',
        '    case "$quire_path/$word" in',
        *[f'      {shlex.quote(_key(*_parent(words)))}) quire_path="{words}" ;;' for words in nodes if words],
        "    esac",
        "  done",
        '  case "$quire_path $prev" in',
        *[
            f"    {pattern}) {_zsh_values(flag)} ; return ;;"
            for words, node in nodes.items()
            for flag in node.flags
            if flag.takes_value
            for pattern in ["|".join(shlex.quote(f"{words} {name}") for name in flag.names)]
        ],
        "  esac",
        '  case "$quire_path" in',
        *[
            f"    {shlex.quote(words)}) known=({' '.join(map(shlex.quote, _described(node)))}) ;;"
            for words, node in nodes.items()
        ],
        "  esac",
        "  _describe 'quire' known || _files",
        "}",
        # Autoloaded from fpath the file is the function's body; sourced, it registers the function.
        'if [[ "${funcstack[1]}" == _quire ]]; then _quire "$@"; else compdef _quire quire; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_values(flag: Flag) -> str:
    return f"compadd -- {' '.join(map(shlex.quote, flag.values))}" if flag.values else "_files"


def _described(node: Node) -> list[str]:
    """Entries as `_describe` takes them: a colon between the word and its meaning."""
    commands = [f"{name}:{text}" for name, text in node.commands.items()]
    flags = [f"{name}:{flag.help}" for flag in node.flags for name in flag.names]
    return [*commands, *node.words, *(entry.replace("\n", " ") for entry in flags)]


def fish(nodes: Mapping[str, Node]) -> str:
    """One line per command and flag, each with the condition under which it is offered."""
    lines = ["# completion of quire for fish; made by `quire completion fish`"]
    for words, node in nodes.items():
        when = _fish_condition(words, node)
        for name, text in node.commands.items():
            lines.append(f"complete -c quire -f -n {when} -a {shlex.quote(name)} -d {_fish_text(text)}")
        if node.words:
            lines.append(f"complete -c quire -n {when} -a {_fish_text(' '.join(node.words))}")
        lines += [_fish_flag(flag, when) for flag in node.flags]
    return "\n".join(lines) + "\n"


def _fish_condition(words: str, node: Node) -> str:
    if not words:
        return "__fish_use_subcommand"
    tests = [f"__fish_seen_subcommand_from {word}" for word in words.split()]
    if node.commands:
        tests.append(f"not __fish_seen_subcommand_from {' '.join(node.commands)}")
    return f'"{"; and ".join(tests)}"'


def _fish_flag(flag: Flag, when: str) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
    value = (
        f" -x -a {_fish_text(' '.join(flag.values))}" if flag.values else " -r" if flag.takes_value else ""
    )
    return f"complete -c quire -n {when} {names}{value} -d {_fish_text(flag.help)}"


def _fish_text(text: str) -> str:
    """Quoted for fish, where a backslash and a quote are escaped inside single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
