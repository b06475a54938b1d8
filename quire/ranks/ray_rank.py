"""A rank as a Ray actor: Ray places and starts it, and carries its log to the driver; all else goes our own way."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from quire.config import gpu_index
from quire.ranks.frames import FrameSocket
from quire.ranks.rank import Rank
from quire.ranks.secret import greet

_CONNECT_SECONDS = 30.0


def machine_name() -> str:
    """The same for processes that can look at each other in /proc: of one machine, and of one container there."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class RayRank:
    """Ray makes an actor of this class. Its calls carry plain data only."""

    def __init__(self, name: str) -> None:
        self._name = name
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def __repr__(self) -> str:
        """How Ray names its lines in the driver's log."""
        return self._name

    def whereabouts(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        gpus = [gpu_index(str(gpu)) for gpu in context.get_accelerator_ids().get("GPU", [])]
        return {"pid": os.getpid(), "node": context.get_node_id(), "address": ray.util.get_node_ip_address(),
                "machine": machine_name(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus}

    def echo(self, data: bytes) -> bytes:
        """What a call of an actor costs."""
        return data

    def serve(self, address: str, port: int, secret: bytes, index: int) -> None:
        """Until the engine closes the connection, which ends the process."""
        sock = socket.create_connection((address, port), _CONNECT_SECONDS)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sending, receiving = greet(sock, secret, index)
        Rank(FrameSocket(sock, sending, receiving)).run()
