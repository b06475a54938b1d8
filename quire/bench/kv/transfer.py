"""`quire bench transfer`: how fast KV gets from one process into the blocks of another, by each transport.

Sent are so many blocks of a model's shape: with equal layouts, whose neighbouring blocks are merged into one write
(`merged`) or lie scattered (`scattered`), and into blocks of twice the size, by token (`by token`). Each time is from
the call to the moment at which the other side has said that all of it is in place. Beside them, in the same run and
in turns: a copy of as many bytes in one process, and as many bytes over a loopback TCP connection into plain memory.
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.bench.kv.transfer_shape import Shape
from quire.child import child_environment, module_command
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.kvtransfer.sender import KVSender

EXAMPLES = (
    "examples:\n"
    "  quire bench transfer\n"
    "  quire bench transfer --transports tcp --blocks 1 256 --block-sizes 16 --shape 32 8 128"
)
FORMS = ("merged", "scattered", "by token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transports", nargs="+", metavar="NAME",
                        help="of shm, mooncake and tcp (default: all that this machine has)")
    parser.add_argument("--shape", type=int, nargs=3, default=(30, 3, 64), metavar=("LAYERS", "HEADS", "WIDTH"),
                        help="kv heads and their width (default: SmolLM2-135M's, 30 3 64), in float32")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=(16, 128), metavar="TOKENS")
    parser.add_argument("--blocks", type=int, nargs="+", default=(1, 8, 64, 256), metavar="N",
                        help="blocks sent at once (default: 1 8 64 256)")
    parser.add_argument("--most-tokens", type=int, default=4096, metavar="N",
                        help="leave out cases of more tokens than this (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="the median counts (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    from quire.kvtransfer.transports import TRANSPORTS, transport
    from quire.machine import describe_machine, rdma_report

    if min(*args.shape, *args.block_sizes, *args.blocks, args.repeats) < 1:
        raise ConfigError("--shape, --block-sizes, --blocks and --repeats must be at least 1", "blocks")
    names = args.transports or list(TRANSPORTS)
    missing = {name: transport(name).missing() for name in names}
    names = [name for name in names if missing[name] is None]
    for name, why in missing.items():
        if why is not None:
            print(f"{name} is left out: {why}", flush=True)
    print(f"RDMA: {rdma_report()}", flush=True)
    if not names:
        raise ConfigError("no transport is left to measure", "transports")
    machine, lines = describe_machine(), []
    for size in args.block_sizes:
        counts = [count for count in args.blocks if count * size <= args.most_tokens]
        for line in _measure(Shape(*args.shape), size, counts, names, args.repeats) if counts else ():
            lines.append(line)
            print(json.dumps({"bench": "transfer", **line, "shape": list(args.shape), **machine}), flush=True)
    print(table(lines), flush=True)
    return 0


class _Peer:
    """The process on the other side."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def ask(self, question: object) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise QuireError(f"the receiving process ended with {self._child.wait(10)}")
        return json.loads(answer)


@contextmanager
def _peer() -> Iterator[_Peer]:
    child = subprocess.Popen(module_command("quire.bench.kv.transfer_peer"), stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, env=child_environment())
    try:
        yield _Peer(child)
    finally:
        child.kill()
        child.communicate()


def _measure(shape: Shape, size: int, counts: list[int], names: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """One line for each count, form and transport, and for the two that everything is compared with."""
    from quire.kvtransfer.sender import KVSender

    tokens, secret = max(counts) * size, secrets.token_bytes(32)
    store = shape.store(size, max(counts))
    with _peer() as peer:
        told = peer.ask({"shape": {"layers": shape.layers, "heads": shape.heads, "width": shape.width},
                         "secret": secret.hex(), "block_size": size, "tokens": tokens, "transports": names,
                         "bytes": tokens * shape.bytes_per_token})
        with socket.create_connection(("127.0.0.1", told["loopback"])) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            senders = {(name, form): KVSender(store, [told["addresses"][form]], secret, transports=[name], timeout=60)
                       for name in names for form in ("equal", "unequal")}
            try:
                for count in counts:
                    yield from _count(shape, size, count, plain, peer, senders, repeats)
            finally:
                for sender in senders.values():
                    sender.close()


def _count(shape: Shape, size: int, count: int, plain: socket.socket, peer: _Peer,
           senders: dict[tuple[str, str], KVSender], repeats: int) -> Iterator[dict[str, Any]]:
    nbytes = count * size * shape.bytes_per_token
    actions: dict[tuple[str, str], Callable[[], None]] = {
        ("copy", ""): _copy(nbytes), ("loopback", ""): lambda: _loopback(plain, nbytes)}
    opened = []
    for (name, form), sender in senders.items():
        tables = {"merged": list(range(count)), "scattered": list(range(count))[::-1]}
        for kind, table in tables.items() if form == "equal" else {"by token": tables["merged"]}.items():
            if kind == "scattered" and count == 1:
                continue
            # Reversed on one side only: no two blocks are neighbours on both.
            there = tables["merged"] if form == "equal" else list(range(-(-count // 2)))
            ticket = peer.ask({"form": form, "table": there, "tokens": count * size})
            opened.append((form, ticket["transfer"]))
            actions[name, kind] = _send(sender, ticket, table, count * size)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in actions}
    for repeat in range(-1, repeats):
        for key, action in actions.items():  # in turns, so that a busy moment of the machine is nobody's alone
            start = time.perf_counter()
            action()
            if repeat >= 0:
                times[key].append(time.perf_counter() - start)
    for form, transfer in opened:
        peer.ask({"form": form, "close": transfer})
    medians = {key: statistics.median(each) for key, each in times.items()}
    for (name, kind), seconds in medians.items():
        yield {"transport": name, "form": kind, "block_size": size, "blocks": count, "bytes": nbytes,
               "ms": round(seconds * 1e3, 3), "ms_best": round(min(times[name, kind]) * 1e3, 3),
               "gb_per_s": round(nbytes / seconds / 1e9, 3),
               "share_of_copy": round(medians["copy", ""] / seconds, 3),
               "share_of_loopback": round(medians["loopback", ""] / seconds, 3)}


def _send(sender: KVSender, ticket: dict[str, Any], table: list[int], tokens: int) -> Callable[[], None]:
    def send() -> None:
        sender.send(ticket, [table], 0, tokens)

    return send


def _copy(nbytes: int) -> Callable[[], None]:
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return lambda: np.copyto(target, source)


def _loopback(sock: socket.socket, nbytes: int) -> None:
    sock.sendall(nbytes.to_bytes(8, "little"))
    sock.sendall(bytes(nbytes))
    if not sock.recv(1):
        raise QuireError("the receiving process has hung up")


def table(lines: list[dict[str, Any]]) -> str:
    """GB/s of every case; a row for each count of blocks."""
    columns = list(dict.fromkeys((line["transport"], line["form"]) for line in lines))
    head = ["block", "blocks", "MB", *(f"{name} {form}".strip() for name, form in columns)]
    rows = []
    for key in dict.fromkeys((line["block_size"], line["blocks"], line["bytes"]) for line in lines):
        found = {(line["transport"], line["form"]): line for line in lines
                 if (line["block_size"], line["blocks"], line["bytes"]) == key}
        cells = [f"{found[column]['gb_per_s']:.2f} GB/s, {found[column]['ms']:.2f} ms" if column in found else "–"
                 for column in columns]
        rows.append([str(key[0]), str(key[1]), f"{key[2] / 1e6:.1f}", *cells])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
                     for row in [head, *rows])
