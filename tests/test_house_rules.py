"""Rules of the house that a machine can check: short files and functions, arrows that point down, nothing dangerous."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST_FUNCTION = 70
LONGEST_FILE = 600
FRONT_DOORS = ("bench", "cli", "client", "eval", "fuzz", "router", "sim")
"""Rooms that use the engine and that nothing in it may know."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> dict[str, ast.Module]:
    files = sorted((ROOT / "quire").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def functions(tree: ast.Module) -> Iterator[Function]:
    """All but Triton's kernels: what one program does in registers cannot be cut at will."""
    for node in ast.walk(tree):
        if isinstance(node, Function) and not any("triton" in ast.unparse(d) for d in node.decorator_list):
            yield node


def length(node: Function | ast.ClassDef) -> int:
    """Lines of it; a class made in a function, because its base is imported late, is not the function's own."""
    inner = sum(length(each) for each in node.body if isinstance(each, ast.ClassDef) and isinstance(node, Function))
    return (node.end_lineno or 0) - node.lineno + 1 - inner


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


Imports = dict[str, set[str]]
"""By module or room: those it imports."""


@cache
def modules() -> dict[str, ast.Module]:
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
            for path, tree in sources().items()}


def imported(nodes: Iterable[ast.AST], types_too: bool) -> Iterator[str]:
    """Modules of ours that are imported in `nodes`, at the top of a file or late, in a function."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types_too:
            yield from imported(node.orelse, types_too)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner & modules().keys() or {node.module or ""}
        else:
            yield from imported(ast.iter_child_nodes(node), types_too)


def file_imports(types_too: bool) -> Imports:
    return {name: set(imported(tree.body, types_too)) - {name} for name, tree in modules().items()}


def room_imports() -> Imports:
    """Between rooms, what runs: a name that only a type checker reads binds nobody."""
    found: Imports = {}
    for name, others in file_imports(types_too=False).items():
        mine = found.setdefault(room_of(name), set())
        mine |= {room_of(other) for other in others} - {room_of(name)}
    return found


def room_of(module: str) -> str:
    """A folder of the house; a file that stands at its front is a room of its own, the front page belongs to nobody."""
    return module.split(".")[1] if "." in module else module


def circles(graph: Imports) -> set[frozenset[str]]:
    """Whoever can be reached from itself, with those it is reached through: of any length."""
    reach: Imports = {}
    for start in graph:
        seen: set[str] = set()
        queue = list(graph[start])
        while queue:
            at = queue.pop()
            if at not in seen:
                seen.add(at)
                queue += graph.get(at, ())
        reach[start] = seen
    return {frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in graph
            if name in reach[name]}


def room(path: str) -> str:
    return path.split("/")[1]


def test_a_function_fits_on_a_screen() -> None:
    found = [(length(node), f"{path}: {node.name}") for path, tree in sources().items() for node in functions(tree)]
    assert [each for each in found if each[0] > LONGEST_FUNCTION] == []


def test_a_file_is_short_and_says_its_reason_first() -> None:
    for path, tree in sources().items():
        text = (ROOT / path).read_text()
        assert len(text.splitlines()) <= LONGEST_FILE, path
        assert not text.strip() or ast.get_docstring(tree), path


def test_arrows_point_down() -> None:
    for path, tree in sources().items():
        names = set(imports(tree))
        if room(path) in ("scheduler", "kvcache"):
            assert not {name for name in names if name.split(".")[0] in ("torch", "numpy")}, path
        if room(path) == "kvtransfer" and path != "quire/kvtransfer/store.py":
            assert not {name for name in names if name.split(".")[0] == "torch"}, path
        if room(path) not in (*FRONT_DOORS, "__main__.py"):
            assert not {name for name in names if name.startswith(tuple(f"quire.{door}" for door in FRONT_DOORS))}, path
        assert not {name for name in names if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill")}, path


def test_no_file_imports_itself_round_a_corner() -> None:
    """Every import counts: at the top, late in a function, and for types alone. Files in a circle are one file."""
    assert circles(file_imports(types_too=True)) == set()


def test_no_room_imports_itself_round_a_corner() -> None:
    """Late imports count, those for types do not: what a scheduler hands to a grammar may be named where it is used."""
    graph = room_imports()
    graph.pop("quire")  # the front page names what it shows; whoever imports it wants the version
    assert circles({name: others - {"quire"} for name, others in graph.items()}) == set()


def test_circles_are_found_whatever_their_length() -> None:
    line = {"a": {"b"}, "b": {"c"}, "c": set[str](), "d": {"a", "c"}}
    assert circles(line) == set()
    assert circles({**line, "c": {"a"}}) == {frozenset("abc")}
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a", "d"}, "d": {"c"}}) == {frozenset("ab"), frozenset("cd")}


def test_no_text_becomes_code() -> None:
    for path, tree in sources().items():
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("eval", "exec", "torch.load", "os.system"), path


def test_the_environment_is_read_in_config_only() -> None:
    """Others may hand it on to a process that they start, whole."""
    for path, tree in sources().items():
        if path not in ("quire/config.py", "quire/server_config.py", "quire/options.py"):
            for node in ast.walk(tree):
                read = isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get")
                assert not read or "PYTHONPATH" in ast.unparse(node), f"{path}:{node.lineno}"


ARITHMETIC = ("kernels", "attention", "ops", "layers", "models")
"""Rooms of the arithmetic, lowest first."""


def test_the_stack_of_operations_has_no_circle() -> None:
    for path, tree in sources().items():
        if room(path) in ARITHMETIC:
            above = ARITHMETIC[ARITHMETIC.index(room(path)) + 1 :]
            assert not {name for name in imports(tree) if name.startswith(tuple(f"quire.{one}" for one in above))}, path


def test_no_backend_is_probed_for_what_it_can_do() -> None:
    for path, tree in sources().items():
        if room(path) in (*ARITHMETIC, "worker"):
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            assert not [node.lineno for node in calls if ast.unparse(node.func) == "hasattr"], path
