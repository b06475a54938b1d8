"""Rules of the house that a machine can check: short files and functions, arrows that point down, nothing dangerous."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST_FUNCTION = 70
LONGEST_FILE = 600
FRONT_DOORS = ("bench", "cli", "client", "eval", "fuzz", "sim")
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
        if room(path) not in (*FRONT_DOORS, "__main__.py"):
            assert not {name for name in names if name.startswith(tuple(f"quire.{door}" for door in FRONT_DOORS))}, path
        assert not {name for name in names if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill")}, path


def test_no_text_becomes_code() -> None:
    for path, tree in sources().items():
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("eval", "exec", "torch.load", "os.system"), path


def test_the_environment_is_read_in_config_only() -> None:
    """Others may hand it on to a process that they start, whole."""
    for path, tree in sources().items():
        if path != "quire/config.py":
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
