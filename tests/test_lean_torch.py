"""The commands' torch lacks what only compilers need, and gets it when somebody asks."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from quire.lean_torch import import_torch
import_torch()
import torch
name = "torch._meta_registrations"
gpu = torch.cuda.is_available()
assert (name in sys.modules) == gpu
x = torch.empty(3, 4).uniform_()
assert torch.cat([x, x @ x.T @ x]).shape == (6, 4)
import torch._meta_registrations as real
assert real.__file__ and sys.modules[name] is real
import_torch()
assert sys.modules[name] is real
"""


def test_shape_functions_come_when_they_are_asked_for() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
