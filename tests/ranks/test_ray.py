"""Ranks as actors of a real Ray cluster of two nodes: the same tokens, lost nodes noticed, nothing left behind."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDeadError
from quire.parallel.place import Place
from quire.ranks.local import same_for_all
from quire.ranks.ray_launch import start_ray
from quire.scheduler.plan import StepPlan
from tests.ranks.processes import PATIENCE, until_gone

ray = pytest.importorskip("ray")
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
PROMPTS = ["The capital of France is", "Once upon a time", "1 2 3 4 5"]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=8, logprobs=2),
          SamplingParams(temperature=1.0, seed=5, max_tokens=8, logprobs=2),
          SamplingParams(temperature=1.0, seed=6, max_tokens=6, n=2)]
SMALL: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory": "32MiB", "device": "cpu", "num_threads": 1}


@pytest.fixture(scope="module", autouse=True)
def priority() -> Iterator[None]:
    """Ray's workers run at nice 15 else: where other tests compute, a rank then takes minutes to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 2})  # Ray believes what it is told
    made.add_node(**{**NODE, "resources": {"second": 1}})
    yield made
    made.shutdown()


def answers(**options: Any) -> list[Any]:
    with LLM("smollm2-135m", **SMALL, **options) as llm:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[(one.token_ids, one.logprobs) for one in output.outputs] for output in found]


def placement_groups() -> list[str]:
    return [group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def test_two_stages_of_two_ranks_on_two_nodes_give_the_tokens_of_one_process(smollm2: str, cluster: Any) -> None:
    found = answers(tensor_parallel_size=2, pipeline_parallel_size=2, ray_address=cluster.address)
    assert not ray.is_initialized()  # the engine has left the cluster that it joined
    assert found == answers()
    ray.init(address=cluster.address, logging_level="error")
    try:
        assert placement_groups() == []
    finally:
        ray.shutdown()


def test_a_lost_node_is_noticed_and_takes_the_ranks_with_it(cluster: Any) -> None:
    third = cluster.add_node(**{**NODE, "num_cpus": 3, "resources": {"third": 1}})
    ray.init(address=cluster.address, logging_level="error")
    try:
        worker = {"kind": "kv_hash", "num_blocks": 16, "block_size": 4, "step_seconds": 0.05}
        executor, _ = start_ray(Place.all(3, 1), worker, same_for_all, None, 1)
        pids = [state.pid for state in executor.ranks.states]
        assert not any(handle.local for handle in executor.ranks.handles)
        futures = [executor.submit(StepPlan(step)) for step in range(1, 100)]
        futures[2].result(PATIENCE)
        began = time.monotonic()
        cluster.remove_node(third)
        with pytest.raises(EngineDeadError, match=r"rank \d of 3"):
            futures[-1].result(PATIENCE)
        assert time.monotonic() - began < 30
        executor.close()
        until_gone(pids)
        assert placement_groups() == []
    finally:
        ray.shutdown()


@pytest.mark.parametrize(("sizes", "why"), [
    ({"tensor_parallel_size": 3}, "no node of this cluster has room for more than 2 ranks of 1 CPU:"),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, "for 2 of the 3 stages .* pipeline_parallel_size=2,")])
def test_ranks_that_fit_no_node_are_refused(cluster: Any, tiny_llama: Path, sizes: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        LLM(str(tiny_llama), ray_address=cluster.address, **sizes, **SMALL)
    assert refused.value.field == list(sizes)[-1]
    assert not ray.is_initialized()


def test_stages_are_spread_where_other_jobs_hold_a_part_of_every_node(cluster: Any) -> None:
    ray.init(address=cluster.address, logging_level="error")
    try:
        others = [ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")]
        ray.get(others[0].ready())
        executor, _ = start_ray(Place.all(1, 2), {"kind": "dummy", "vocab_size": 9}, same_for_all, None, 1)
        executor.submit(StepPlan(1)).result(PATIENCE)
        assert len({handle.local for handle in executor.ranks.handles}) == 2  # one on the driver's node, one not
        executor.close()
        ray.util.remove_placement_group(others[0])
        assert placement_groups() == []
    finally:
        ray.shutdown()


def test_ranks_on_gpus_ask_for_one_each_and_share_a_node(cluster: Any) -> None:
    """No GPU is there: Ray counts, and deals out numbers."""
    ray.init(address=cluster.address, logging_level="error")
    try:
        worker = {"kind": "dummy", "vocab_size": 100}
        with pytest.raises(ConfigError, match="no node of this cluster has room for more than 2") as refused:
            start_ray(Place.all(2, 2), worker, same_for_all, None, 1, gpus=1)
        assert refused.value.field == "tensor_parallel_size"
        executor, _ = start_ray(Place.all(2, 1), worker, same_for_all, None, 1, gpus=1)
        try:
            assert sorted(handle.gpus for handle in executor.ranks.handles) == [[0], [1]]  # type: ignore[attr-defined]
            assert "GPU" not in ray.available_resources()
        finally:
            executor.close()
        assert placement_groups() == []
    finally:
        ray.shutdown()


def test_connections_without_the_secret_are_dropped(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else connects first, and speaks before any rank does."""
    made = socket.create_server

    def create_server(address: tuple[str, int], **more: Any) -> socket.socket:
        server = made(address, **more)
        intruder = socket.create_connection(server.getsockname())
        intruder.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
        intruders.append(intruder)
        return server

    intruders: list[socket.socket] = []
    monkeypatch.setattr("socket.create_server", create_server)
    ray.init(address=cluster.address, logging_level="error")
    try:
        executor, _ = start_ray(Place.all(1, 1), {"kind": "dummy", "vocab_size": 9}, same_for_all, None, 1)
        executor.submit(StepPlan(1)).result(PATIENCE)
        executor.close()
        assert len(intruders) == 1
        intruders[0].settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            while intruders[0].recv(1000):  # the other side's question; then the end
                pass
        intruders[0].close()
    finally:
        ray.shutdown()


def test_from_a_bare_ray_init_ranks_share_the_drivers_node(tiny_llama: Path) -> None:
    def tokens(**options: Any) -> list[Any]:
        with LLM(str(tiny_llama), skip_tokenizer_init=True, **SMALL, **options) as llm:
            return [list(one.outputs[0].token_ids) for one in llm.generate(
                [[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), use_tqdm=False)]

    ray.init(address="local", logging_level="error", **NODE)
    try:
        assert tokens(tensor_parallel_size=2, distributed_executor_backend="ray") == tokens()
        assert ray.is_initialized() and placement_groups() == []
    finally:
        ray.shutdown()
