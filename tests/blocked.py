"""The beginning of a program that finds none of the packages named in its first argument; the others are its own."""

from __future__ import annotations

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

OTHERS = set(sys.argv.pop(1).split())
sys.meta_path.insert(0, Missing())
"""
