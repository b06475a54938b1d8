"""Starts ranks as actors of a Ray cluster: on one node where they fit, else a stage to a node.

Ray is used to place and start processes, for their logs, and to end them. Plans, results, heartbeats and hidden states
go through memory and sockets of our own: a call of an actor takes three times as long as a message and its answer
(`quire bench parallel --ray`), there is one call for each actor, and Ray notices a lost node only after 15 seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, EngineError
from quire.parallel.place import Place
from quire.ranks.executor import RankExecutor
from quire.ranks.frames import FrameSocket, Kind
from quire.ranks.group import RankGroup
from quire.ranks.launch import SEND_SECONDS, RankHandle, is_stopped
from quire.ranks.local import SPIN_SECONDS, Agree
from quire.ranks.ray_rank import RayRank, machine_name
from quire.ranks.ring import RingWriter, ring_bytes
from quire.ranks.secret import WrongSecret, welcome
from quire.ranks.shared_memory import SharedMemory
from quire.ranks.shared_parts import SharedParts, stage_after, stage_before
from quire.ranks.start import MemoryAddress, RankStart, place_name

LOOPBACK = "127.0.0.1"
_PACK_SECONDS = 5.0
"""How long all ranks wait for room on one node, where stages may be spread instead."""
_PLACE_SECONDS = 60.0
_CONNECT_SECONDS = 120.0
_END_SECONDS = 5.0


def import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise ConfigError("distributed_executor_backend 'ray' needs the package ray: pip install 'quire[ray]'",
                          field="distributed_executor_backend") from None
    return ray


class RayHandle:
    """An actor. `here`: it runs on the driver's own node; `found` is what it said of its whereabouts. Nodes may share a
    machine with the driver's: there its process can be looked at."""

    def __init__(self, ray: Any, actor: Any, serving: Any, link: FrameSocket, found: dict[str, Any], here: bool
                 ) -> None:
        self._ray, self._actor, self._serving = ray, actor, serving
        self.link, self.pid, self.local = link, found["pid"], here
        self._visible = found["machine"] == machine_name()
        self.gpus: list[int] = found["gpus"]
        """Those that Ray gave it."""

    def ended(self, seconds: float) -> str | None:
        done, _ = self._ray.wait([self._serving], timeout=max(seconds, 0.001))
        if not done:
            return None
        try:
            self._ray.get(self._serving)
        except Exception as error:  # Ray's own classes, which differ by what happened
            return f"its actor ended: {str(error).strip().splitlines()[0]}"
        return "its connection to the engine was lost"

    def stopped(self) -> bool | None:
        return is_stopped(self.pid) if self._visible else None

    def end(self) -> None:
        # In this order: an actor that ends by itself is an accident to Ray, which says so at length.
        self._ray.kill(self._actor, no_restart=True)

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)
        self.link.close()
        if self._visible:  # Ray asks a process to end; one that is stopped does not hear that
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                os.kill(self.pid, signal.SIGKILL)


class RayLauncher:
    def __init__(self, places: list[Place], worker: dict[str, Any], address: str | None, cpus: int,
                 use_ring: bool = True, gpus: int = 0) -> None:
        """`address` None: the cluster that this process is connected to, or a new one of its own. `cpus` and `gpus`
        are those of each rank. `use_ring` false: plans go through sockets also where a rank shares the driver's
        node."""
        self.places = places
        self._use_ring = use_ring
        self._worker, self._cpus, self._gpus = worker, cpus, gpus
        self._ray = import_ray()
        self._connected = not self._ray.is_initialized()
        if self._connected:
            self._ray.init(address=address, log_to_driver=True, logging_level="warning")
        self._group: Any = None
        self._actors: list[Any] = []
        """Ray ends actors without a reference."""
        self._memory: list[SharedMemory] = []
        self.ring: RingWriter | None = None
        self._secret = secrets.token_bytes(32)

    def start(self) -> list[RankHandle]:
        actors = self._actors = self._place()
        asked = [actor.whereabouts.remote() for actor in actors]
        _, late = self._ray.wait(asked, num_returns=len(asked), timeout=_CONNECT_SECONDS)
        if late:
            raise EngineError(f"Ray has not started {len(late)} of {len(asked)} ranks within {_CONNECT_SECONDS:.0f} "
                              "seconds: its nodes are busy (it runs workers at low priority), or cannot start workers")
        found = self._ray.get(asked)
        mine = self._ray.get_runtime_context().get_node_id() if self._use_ring else ""
        many = len({each["node"] for each in found}) > 1 or found[0]["node"] != mine
        links, serving = self._connect(actors, many)
        handles = [RayHandle(self._ray, actor, serve, link, each, each["node"] == mine)
                   for actor, serve, link, each in zip(actors, serving, links, found, strict=True)]
        for handle, start in zip(handles, self._starts(handles, found, mine), strict=True):
            handle.link.send(Kind.START, start.to_json())
        return list(handles)

    # ---- where

    def _place(self) -> list[Any]:
        """Actors in a placement group: all on one node, or each stage on one."""
        ray, ways = self._ray, self._ways()
        for bundles, strategy in ways:
            self._group = ray.util.placement_group(bundles, strategy=strategy)
            last = (bundles, strategy) == ways[-1]
            ready, _ = ray.wait([self._group.ready()], timeout=_PLACE_SECONDS if last else _PACK_SECONDS)
            if ready:
                return [self._actor(place, 0 if len(bundles) == 1 else place.stage) for place in self.places]
            ray.util.remove_placement_group(self._group)
            self._group = None
        raise EngineError(f"Ray found no room for {len(self.places)} ranks of {self._each()} within "
                          f"{_PLACE_SECONDS:.0f} seconds: other jobs hold the cluster's")

    def _ways(self) -> list[tuple[list[dict[str, int]], str]]:
        """Bundles and strategies that suit the cluster's nodes, if nobody else uses them, the best first."""
        ranks, size, stages = len(self.places), self.places[0].tensor_size, self.places[0].num_stages
        rooms = [self._room(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]
        most, stages_fit = max(rooms, default=0), sum(room // size for room in rooms)
        ways = [([self._resources(ranks)], "STRICT_PACK")] if most >= ranks else []
        if stages > 1 and stages_fit >= stages and not self._gpus:
            ways.append(([self._resources(size)] * stages, "PACK"))
        if ways:
            return ways
        if self._gpus:
            raise ConfigError(
                f"the {ranks} ranks of an engine on GPUs share a node, and no node of this cluster has room for more "
                f"than {most} of {self._each()} each: lower tensor_parallel_size or pipeline_parallel_size",
                field="tensor_parallel_size")
        if most < size:
            raise ConfigError(
                f"the {size} tensor ranks of a stage share a node, and no node of this cluster has room for more than "
                f"{most} ranks of {self._each()}: lower tensor_parallel_size or num_threads",
                field="tensor_parallel_size")
        raise ConfigError(
            f"the nodes of this cluster have room for {stages_fit} of the {stages} stages ({size} ranks of "
            f"{self._each()} each, on one node): use pipeline_parallel_size={stages_fit}, or lower num_threads",
            field="pipeline_parallel_size")

    def _each(self) -> str:
        """What a rank takes, in words."""
        cpus = f"{self._cpus} CPU{'s' * (self._cpus > 1)}"
        return f"{cpus} and {self._gpus} GPU" if self._gpus else cpus

    def _room(self, resources: dict[str, float]) -> int:
        """Ranks that a node of these resources could hold."""
        room = int(resources.get("CPU", 0)) // self._cpus
        return min(room, int(resources.get("GPU", 0)) // self._gpus) if self._gpus else room

    def _resources(self, ranks: int) -> dict[str, int]:
        """Of a bundle for so many ranks."""
        found = {"CPU": self._cpus * ranks}
        return {**found, "GPU": self._gpus * ranks} if self._gpus else found

    def _actor(self, place: Place, bundle: int) -> Any:
        ray = self._ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle)
        # Nodes of this machine run this very package, others what is installed there.
        package = str(Path(__file__).resolve().parents[2])
        # A rank opens memory of the others' GPUs, so Ray must not hide them from it; it is told which one is its own.
        environment = {"env_vars": {"PYTHONPATH": package, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        return ray.remote(RayRank).options(
            num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0, scheduling_strategy=strategy,
            runtime_env=environment).remote(place_name(place))

    # ---- connections

    def _connect(self, actors: list[Any], many: bool) -> tuple[list[FrameSocket], list[Any]]:
        """Each actor connects to this process, and proves that it was started by it."""
        address = self._ray.util.get_node_ip_address() if many else LOOPBACK
        links: dict[int, FrameSocket] = {}
        until = time.monotonic() + _CONNECT_SECONDS
        with socket.create_server((address, 0), backlog=len(actors) + 16) as listener:
            port = listener.getsockname()[1]
            serving = [actor.serve.remote(address, port, self._secret, index) for index, actor in enumerate(actors)]
            while len(links) < len(actors):
                ended, _ = self._ray.wait(serving, timeout=0)
                if ended or time.monotonic() > until:
                    raise EngineError("a rank's actor did not connect to the engine"
                                      + "".join(f": {self._why(each)}" for each in ended[:1]))
                listener.settimeout(1.0)
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                found = self._welcome(sock, len(actors))
                if found is not None:
                    links[found[0]] = found[1]
        return [links[index] for index in range(len(actors))], serving

    def _welcome(self, sock: socket.socket, count: int) -> tuple[int, FrameSocket] | None:
        """Connections without the secret are dropped."""
        try:
            index, sending, receiving = welcome(sock, self._secret)
            if index >= count:
                raise WrongSecret(f"there is no rank {index}")
        except WrongSecret:
            sock.close()
            return None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(SEND_SECONDS)
        return index, FrameSocket(sock, sending, receiving)

    def _why(self, serving: Any) -> str:
        try:
            self._ray.get(serving)
        except Exception as error:
            return str(error).strip().splitlines()[-1]
        return "it ended"

    # ---- what each is told

    def _starts(self, handles: list[RayHandle], found: list[dict[str, Any]], mine: str) -> list[RankStart]:
        nodes: dict[str, list[int]] = {}
        for index, each in enumerate(found):
            nodes.setdefault(each["node"], []).append(index)
        readers = nodes.get(mine, [])
        if readers:
            self._memory.append(SharedMemory.create("ring", ring_bytes(len(readers))))
            self.ring = RingWriter(self._memory[0], len(readers))
        starts = [RankStart(place, self._worker, len(nodes[each["node"]]),
                            SPIN_SECONDS if len(nodes[each["node"]]) <= each["cores"] else 0.0,
                            gpu=each["gpus"][0] if self._gpus else None)
                  for place, each in zip(self.places, found, strict=True)]
        made = self._make(handles, found, nodes)
        for node, indices in nodes.items():
            parts = SharedParts([self.places[index] for index in indices])
            for index in indices:
                leader = made[indices[0]]
                if parts.size:
                    starts[index] = parts.give(starts[index], leader["pid"], leader["fd"])
                if node == mine:
                    ring = MemoryAddress(os.getpid(), self._memory[0].fd)
                    starts[index] = dataclasses.replace(starts[index], ring=ring, reader=readers.index(index),
                                             num_readers=len(readers))
        return [self._with_network(start, starts, made, found) for start in starts]

    def _make(self, handles: list[RayHandle], found: list[dict[str, Any]],
              nodes: dict[str, list[int]]) -> list[dict[str, Any]]:
        """The first rank of each node makes the memory of all ranks there; who hears from another node listens."""
        for index, (place, handle) in enumerate(zip(self.places, handles, strict=True)):
            here = nodes[found[index]["node"]]
            size = SharedParts([self.places[each] for each in here]).size if here[0] == index else 0
            outside = place.num_stages > 1 and stage_before(place).index not in here
            handle.link.tell(Kind.MAKE, {"bytes": size, "listen": found[index]["address"] if outside else None})
        made = []
        for handle in handles:
            kind, data = handle.link.receive(_CONNECT_SECONDS)
            if kind is not Kind.MADE:
                raise EngineError(f"a rank answered with {kind.name} when it was to make memory")
            made.append(json.loads(data))
        return made

    def _with_network(self, start: RankStart, starts: list[RankStart], made: list[dict[str, Any]],
                      found: list[dict[str, Any]]) -> RankStart:
        """Connections to the stages before and after, where those are on other nodes."""
        if start.place.num_stages == 1 or (start.before is not None and start.after is not None):
            return start
        after = stage_after(start.place).index
        to = [found[after]["address"], made[after]["port"]] if starts[after].before is None else None
        return dataclasses.replace(start, network={"secret": self._secret.hex(), "after": to})

    def close(self) -> None:
        for memory in self._memory:
            memory.close()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._connected:
            self._ray.shutdown()


def start_ray(places: list[Place], worker: dict[str, Any], agree: Agree, address: str | None,
              cpus: int, use_ring: bool = True, gpus: int = 0) -> tuple[RankExecutor, dict[str, Any]]:
    """Actors of a Ray cluster, ready for plans, and what they have agreed on; or raises what kept one from it."""
    launcher = RayLauncher(places, worker, address, cpus, use_ring, gpus)
    executor = RankExecutor(places)
    group = RankGroup(launcher, agree, executor)
    group.start()
    executor.connect(group, None)
    try:
        agreed = group.ready.result()
        executor.connect(group, launcher.ring)
        return executor, agreed
    except BaseException:
        group.close()
        raise
