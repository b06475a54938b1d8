"""What one exchange between tensor ranks takes: processes sum a layer's nodes through shared memory, many times."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from quire.child import child_environment, module_command

_WARM_UP = 200


def exchange_times(size: int, rows: int = 1, width: int = 576, count: int = 3000) -> dict[str, Any]:
    """Microseconds of one exchange of a [rows, width] node each, on the first of `size` processes.

    The ranks have nothing else to do, so that this is what the exchange itself costs: what a rank waits for others that
    are still computing comes on top.
    """
    from quire.parallel.shared import shared_group_bytes

    fd = os.memfd_create("quire-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, shared_group_bytes(size))
        words = [str(each) for each in (fd, size, rows, width, count)]
        ranks = [subprocess.Popen(module_command("quire.bench.ranks.exchange", str(rank), *words), pass_fds=[fd],
                                  env=child_environment(), stdout=subprocess.PIPE, text=True) for rank in range(size)]
    finally:
        os.close(fd)
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank of the exchange bench failed")
    return {"bench": "parallel", "case": "exchange", "ranks": size, "rows": rows, "width": width, "exchanges": count,
            "unit": "us", **json.loads(said[0])}


def run_rank(rank: int, fd: int, size: int, rows: int, width: int, count: int) -> dict[str, float]:
    import torch

    from quire.kernels.slices import RankTree
    from quire.parallel.shared import SharedGroup

    torch.set_num_threads(1)
    group, tree = SharedGroup(mmap.mmap(fd, 0), rank, size), RankTree.even(size, size)
    residual, seconds = torch.zeros(rows, width), []
    for _ in range(_WARM_UP + count):
        began = time.perf_counter()
        nodes = group.room(rows, width).fill_(1.0).view(1, rows, width)
        group.sum_nodes(nodes, tree, None, residual)
        seconds.append(time.perf_counter() - began)
    taken = sorted(seconds[_WARM_UP:])
    return {"best": round(1e6 * taken[0], 2), "median": round(1e6 * statistics.median(taken), 2),
            "p99": round(1e6 * taken[int(0.99 * len(taken))], 2)}


if __name__ == "__main__":
    print(json.dumps(run_rank(*map(int, sys.argv[1:]))))
