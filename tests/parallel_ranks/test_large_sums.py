"""Large sums of tensor ranks by torch.distributed: gloo stands for NCCL, which no machine of the tests can run."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quire.config import EngineConfig
from quire.engine.assembly import device
from quire.errors import ConfigError
from quire.parallel import nccl
from quire.parallel.peers import ONE_SHOT_BYTES, PeerGroup, group_bytes
from quire.parallel.threads import thread_collectives
from tests.parallel_ranks.rank_threads import side_by_side

SIZE = 3
COLUMNS = 256
LARGE = 1 + ONE_SHOT_BYTES // (4 * COLUMNS)


def test_large_sums_go_the_other_way_and_small_ones_do_not(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hosts = [each.group for each in thread_collectives(SIZE, 1)]
    barrier = threading.Barrier(SIZE)
    memories = [torch.zeros(group_bytes(4 << 20), dtype=torch.uint8) for _ in range(SIZE)]
    parts = torch.randn(SIZE, LARGE, COLUMNS)
    bias, residual = torch.randn(COLUMNS), torch.randn(LARGE, COLUMNS)
    summed: list[int] = []

    def rank(index: int) -> list[torch.Tensor]:
        host = hosts[index]
        assert host is not None
        add = nccl.connect_sum(host, torch.device("cpu"), dist.ProcessGroupGloo)

        def counted(part: torch.Tensor) -> torch.Tensor:
            summed.append(part.shape[0])
            return add(part)

        group = PeerGroup(index, memories, lambda turn: barrier.wait(60) and None, counted)
        return [group.sum_parts(parts[index, :rows].clone(), bias, residual[:rows]) for rows in (LARGE, 2, LARGE)]

    found = side_by_side([lambda index=index: rank(index) for index in range(SIZE)], barrier.abort)
    assert summed == [LARGE] * 2 * SIZE
    wanted = parts.sum(0) + bias + residual
    for large, small, again in found:
        torch.testing.assert_close(large, wanted)
        torch.testing.assert_close(small, wanted[:2])
        assert torch.equal(large, again)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("gpu", "more"), [
    (False, {"tensor_parallel_size": 2}), (True, {}), (True, {"tensor_parallel_size": 2, "deterministic": True})])
def test_where_nccl_cannot_serve_it_is_refused(gpu: bool, more: dict[str, Any]) -> None:
    config = EngineConfig.create(model="any", rank_exchange="nccl", **more)
    with pytest.raises(ConfigError) as caught:
        device._check_rank_exchange(config, gpu)
    assert caught.value.field == "rank_exchange"


def test_ranks_that_share_a_gpu_have_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    nccl.check_nccl(ranks_share_gpus=False)
    with pytest.raises(ConfigError, match="a GPU for every rank"):
        nccl.check_nccl(ranks_share_gpus=True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="has no NCCL"):
        nccl.check_nccl(ranks_share_gpus=False)
