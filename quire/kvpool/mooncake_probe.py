"""`python -m quire.kvpool.mooncake_probe HOST MASTER PROTOCOL DEVICE`: exits with 0 if a Mooncake master answers.

Mooncake's setup waits for its master, for minutes, and lets no other Python thread run meanwhile. So it is tried in a
process that can be killed before an engine does it.
"""

from __future__ import annotations

import os
import subprocess
import sys

_BYTES = 16 << 20


def master_answers(host: str, master: str, protocol: str, device: str, seconds: float) -> bool:
    """Whether it does within so many seconds."""
    command = [sys.executable, "-m", "quire.kvpool.mooncake_probe", host, master, protocol, device]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              timeout=seconds, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return False
    return done.returncode == 0


def main() -> None:
    from mooncake.store import MooncakeDistributedStore

    host, master, protocol, device = sys.argv[1:]
    code = MooncakeDistributedStore().setup(host, "P2PHANDSHAKE", _BYTES, _BYTES, protocol, device, master)
    os._exit(1 if code else 0)  # without its goodbyes, which take a second


if __name__ == "__main__":
    main()
