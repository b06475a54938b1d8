"""Building and finding the compiled kernels: what goes wrong says what to do."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import subprocess
import sys

import pytest

from quire.errors import KernelBuildError
from quire.kernels.cpu import build as builder
from quire.kernels.cpu import library


def test_a_missing_library_names_the_fix(tmp_path):
    with pytest.raises(KernelBuildError, match=r"python -m quire\.kernels\.cpu\.build"):
        library.load(folder=tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path):
    name = library.supported_variants()[0]
    (tmp_path / builder.library_name(name)).write_bytes(b"not a library")
    with pytest.raises(KernelBuildError, match="cannot be used"):
        library.load(folder=tmp_path)


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(library, "ABI_VERSION", -1)
    with pytest.raises(KernelBuildError, match="another version"):
        library.load()


def test_without_a_compiler_the_build_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "system_compiler", lambda: None)
    monkeypatch.setattr(builder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelBuildError, match="apt install gcc"):
        builder.build(tmp_path)


def test_a_compiler_that_is_too_old_for_the_kernels_is_none(monkeypatch, tmp_path):
    """As gcc 11 on x86: then one comes from PyPI, instead of errors about the source."""
    found = builder.system_compiler()
    if found is None:
        pytest.skip("this machine has no compiler")
    old = tmp_path / "cc"
    old.write_text(f'#!/bin/sh\ngrep -q _Float16 "$1" && exit 1\nexec {found[0]} "$@"\n')
    old.chmod(0o755)
    assert not builder._works([str(old)])
    monkeypatch.setattr(builder.shutil, "which", lambda name: str(old) if name == "cc" else None)
    assert builder.system_compiler() is None
    monkeypatch.setattr(builder.shutil, "which", lambda name: {"cc": str(old), "gcc": found[0]}.get(name))
    assert builder.system_compiler() == found


def test_the_kernels_ask_cpuid_what_a_processor_can(tmp_path):
    """A library that calls __builtin_cpu_supports does not link with ziglang (0.17), which machines without a C
    compiler get. Where it is installed, that is tried."""
    for source in builder.SOURCE_DIR.glob("*.[ch]"):
        assert "__builtin_cpu_supports(" not in source.read_text(), source.name
    if importlib.util.find_spec("ziglang") is not None:
        assert builder.build(tmp_path, [sys.executable, "-P", "-m", "ziglang", "cc"])


def test_a_failing_compiler_is_quoted(tmp_path):
    compiler = [sys.executable, "-c", "import sys; sys.exit('no such header')"]
    with pytest.raises(KernelBuildError, match="no such header"):
        builder.build(tmp_path, compiler)
    assert not list(tmp_path.glob("*.so"))


def test_an_unknown_machine_is_refused(tmp_path):
    with pytest.raises(KernelBuildError, match="riscv64"):
        builder.build(tmp_path, target="riscv64")


def test_the_best_library_of_this_processor_is_chosen():
    best = library.supported_variants()[0]
    assert library.load()._name.endswith(builder.library_name(best))


def test_a_processor_without_the_instructions_does_not_get_the_variant(monkeypatch):
    monkeypatch.setattr(library, "machine", lambda: "x86_64")
    flags = library._NEEDS["x86-64-v3"] | library._NEEDS["x86-64-v2"]
    monkeypatch.setattr(library, "cpu_flags", lambda: flags)
    assert library.supported_variants() == ["x86-64-v3", "x86-64-v2"]


def test_finding_and_building_need_no_torch():
    code = "import sys, quire.kernels.cpu.build, quire.kernels.cpu.library; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_declared_functions_are_exported():
    command = ["nm", "-D", "--defined-only", library.load()._name]
    names = subprocess.run(command, capture_output=True, text=True, check=False)
    if names.returncode != 0:
        pytest.skip("nm is not installed")
    exported = {line.split()[-1] for line in names.stdout.splitlines() if "quire_" in line}
    recorded = {name for name in exported if name.endswith("_recorded")}
    assert exported - recorded == set(library._FUNCTIONS)
    assert {name.removesuffix("_recorded") for name in recorded} < set(library._FUNCTIONS)
    assert isinstance(library.load().quire_linear.argtypes[0], type(ctypes.c_void_p))


def test_a_changed_signature_comes_with_a_new_version() -> None:
    """A library of an older build is refused by its version alone. After a change raise it, and put both here."""
    signatures = [(name, getattr(result, "__name__", None), [each.__name__ for each in arguments])
                  for name, (result, arguments) in library._FUNCTIONS.items()]
    digest = hashlib.sha256(repr(signatures).encode()).hexdigest()[:16]
    assert (library.ABI_VERSION, digest) == (22, "c8fb10f06ab17d3c")
