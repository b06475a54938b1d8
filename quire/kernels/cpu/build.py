"""Compile the C kernels, one shared library per instruction set, with the system's compiler or ziglang's."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from quire.child import installed_command
from quire.errors import KernelBuildError

SOURCE_DIR = Path(__file__).parent
FIX = (
    "install a C compiler (gcc 12 or newer: `apt install gcc libc6-dev`, or `pip install ziglang`), then run "
    "`python -m quire.kernels.cpu.build`"
)
# Products are fused with sums only where the source says so: two copies of a loop must round alike.
_FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden"]
_FLAGS += ["-Wno-psabi"]
_LIBRARIES = ["-lpthread", "-lm"]
# Headers, and what gcc has from 12 on where the kernels use it.
_TRIAL = """\
#include <pthread.h>
#include <math.h>
typedef int four __attribute__((vector_size(16)));
int main(void) {
    _Float16 half = 1;
    four v = {0, 1, 2, 3};
#if defined(__x86_64__)
    v = __builtin_shufflevector(v, v, 2, 3, 0, 1);
#endif
    return v[0] + (int)half - 3;
}
"""
# The variants of each machine, best first; `library.py` picks by what the processor can do.
VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "x86-64-v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        "x86-64-v3": ["-march=x86-64-v3"],
        "x86-64-v2": ["-march=x86-64-v2"],
    },
    "aarch64": {"armv8-a": ["-march=armv8-a"]},
}
_ZIG_CPU = {
    "x86-64-v4": "x86_64_v4",
    "x86-64-v3": "x86_64_v3",
    "x86-64-v2": "x86_64_v2",
    "armv8-a": "generic",
}


def machine() -> str:
    """This machine's name as the variants know it."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def library_name(variant: str) -> str:
    return f"libquire_cpu-{variant}.so"


def system_compiler() -> list[str] | None:
    """The first of cc, gcc and clang that can really build a program like the kernels (headers included)."""
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None and _works([path]):
            return [path]
    return None


def find_compiler() -> list[str]:
    """The command of a working C compiler."""
    system = system_compiler()
    if system is not None:
        return system
    if importlib.util.find_spec("ziglang") is not None:
        return [*installed_command("ziglang"), "cc"]
    raise KernelBuildError(f"no C compiler found for Quire's CPU kernels: {FIX}")


def _works(compiler: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text(_TRIAL)
        command = [*compiler, str(source), "-o", str(Path(folder, "try")), *_LIBRARIES]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compile_command(compiler: list[str], variant: str, output: Path, target: str) -> list[str]:
    """The one command that builds a variant's library."""
    arch = VARIANTS[target][variant]
    if "ziglang" in compiler:
        # zig names processors its own way; an old glibc as target lets the library run on any distribution.
        arch = ["-target", f"{target}-linux-gnu.2.17", f"-mcpu={_ZIG_CPU[variant]}"]
        arch += ["-mprefer-vector-width=512"] if variant == "x86-64-v4" else []
    sources = [str(path) for path in sorted(SOURCE_DIR.glob("*.c"))]
    return [*compiler, *_FLAGS, *arch, "-shared", "-o", str(output), *sources, *_LIBRARIES]


def build(
    output_dir: Path = SOURCE_DIR, compiler: list[str] | None = None, target: str | None = None
) -> list[Path]:
    """Build every variant of `target` (default: this machine) into `output_dir`; returns the libraries."""
    target = target or machine()
    if target not in VARIANTS:
        raise KernelBuildError(f"Quire has no CPU kernels for {target}; it runs on {' and '.join(VARIANTS)}")
    compiler = compiler or find_compiler()
    output_dir.mkdir(parents=True, exist_ok=True)
    jobs = []
    for variant in VARIANTS[target]:
        output = output_dir / library_name(variant)
        partial = output.with_suffix(".so.partial")
        command = compile_command(compiler, variant, partial, target)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        jobs.append((process, partial, output))
    # Wait for all before the first complaint, so that no compiler outlives us.
    texts = [process.communicate()[0] for process, _, _ in jobs]
    for text, (process, partial, output) in zip(texts, jobs, strict=True):
        if process.returncode != 0:
            used = " ".join(compiler)
            raise KernelBuildError(f"building {output.name} with `{used}` failed:\n{text}\n{FIX}")
        # A process that has the old library mapped keeps it; a reader never sees half a file.
        partial.replace(output)
    return [output for _, _, output in jobs]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.kernels.cpu.build", description=__doc__)
    parser.add_argument("--zig", action="store_true", help="use ziglang's compiler even where another exists")
    parser.add_argument("--target", choices=sorted(VARIANTS), help="build for another machine (needs --zig)")
    parser.add_argument("--output", type=Path, default=SOURCE_DIR, help="folder to write the libraries to")
    options = parser.parse_args()
    compiler = [*installed_command("ziglang"), "cc"] if options.zig else None
    try:
        for path in build(options.output, compiler, options.target):
            print(path)
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
