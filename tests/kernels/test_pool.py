"""The kernels' threads: safe after a fork, and from several Python threads at once."""

from __future__ import annotations

import os
import threading

import torch

from quire.ops.cpu import CpuOps


def work(ops: CpuOps, packed, x) -> torch.Tensor:
    for _ in range(20):
        out = ops.linear(x, packed)
    return out


def test_a_forked_child_computes_the_same(ops, randn):
    packed, x = ops.pack_linear(randn(500, 300)), randn(40, 300, seed=1)
    expected = work(ops, packed, x)
    child = os.fork()
    if child == 0:
        same = torch.equal(work(ops, packed, x), expected)
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(work(ops, packed, x), expected)


def test_several_python_threads_may_compute_at_once(randn):
    engines = [CpuOps(num_threads=2) for _ in range(4)]
    packed, x = engines[0].pack_linear(randn(500, 300)), randn(40, 300, seed=1)
    expected = work(engines[0], packed, x)
    results: list[torch.Tensor | None] = [None] * len(engines)

    def run(index: int) -> None:
        results[index] = work(engines[index], packed, x)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None and torch.equal(result, expected) for result in results)


def test_the_number_of_threads_may_change_between_calls(ops, randn):
    packed, x = ops.pack_linear(randn(500, 300)), randn(40, 300, seed=1)
    expected = work(ops, packed, x)
    for count in (1, 4, 2, 1, 3, 2):
        ops.set_num_threads(count)
        assert torch.equal(work(ops, packed, x), expected)
