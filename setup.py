"""What pyproject.toml cannot say: the package carries libraries compiled at install."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from quire.kernels.cpu.build import SOURCE_DIR, VARIANTS, build, library_name, machine  # noqa: E402


class BuildWithKernels(build_py):
    """Compile the kernels into the package that is being built (into the source tree for an editable one)."""

    def _libraries_dir(self) -> Path:
        if self.editable_mode:
            return SOURCE_DIR
        return Path(self.build_lib, SOURCE_DIR.resolve().relative_to(ROOT.resolve()))

    def run(self) -> None:
        super().run()
        build(self._libraries_dir())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        libraries = [str(self._libraries_dir() / library_name(variant)) for variant in VARIANTS[machine()]]
        return [*super().get_outputs(include_bytecode), *libraries]


class PlatformWheel(bdist_wheel):
    """The libraries are loaded with ctypes: any Python 3 will do, but only this kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
