"""What each rank of a model takes at most while it loads, beside its share of weights and KV, rank after rank."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from typing import Any

from quire.child import child_environment, module_command
from quire.machine import peak_memory_bytes
from quire.parallel.place import Place


def rank_memory(model: str, tensor_size: int, num_stages: int, load_format: str = "auto",
                num_kv_blocks: int = 256, **options: Any) -> list[dict[str, Any]]:
    """For each rank, in a process of its own: bytes of its weights as they are kept, of its KV pool, and the most that
    the process had in memory, with the KV pool written to. `options`: others of the engine's (dtype, quantization)."""
    options |= {"load_format": load_format, "num_kv_blocks": num_kv_blocks}
    found = []
    for place in Place.all(tensor_size, num_stages):
        words = [model, json.dumps(options), str(tensor_size), str(num_stages), str(place.index)]
        done = subprocess.run(module_command("quire.bench.ranks.rank_memory", *words), env=child_environment(),
                              capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"rank {place.index} could not be loaded:\n{done.stderr}")
        found.append({"bench": "parallel", "case": "memory", "model": model, "size": f"{tensor_size}x{num_stages}",
                      "rank": place.index, **json.loads(done.stdout)})
    return found


def load_rank(model: str, options: dict[str, Any], place: Place) -> dict[str, int]:
    from quire.config import EngineConfig
    from quire.engine.assembly.device import resolve
    from quire.engine.assembly.source import open_source
    from quire.models.registry import read_spec
    from quire.models.shard import shard_of
    from quire.parallel.collectives import Collectives
    from quire.parallel.shared import SharedGroup, shared_group_bytes
    from quire.worker.worker import Worker

    config = EngineConfig.create(model=model, device="cpu", num_threads=1, skip_tokenizer_init=True, **options)
    source = open_source(config, progress=False)
    config = resolve(config, source)  # integers that the file stores stay such, as in any engine
    shard = shard_of(read_spec(source.config), place)
    group = None
    if place.tensor_size > 1:
        memory = mmap.mmap(-1, shared_group_bytes(place.tensor_size))
        group = SharedGroup(memory, place.tensor_rank, place.tensor_size)
    worker = Worker(source, config, shard, Collectives(group))
    worker.touch_cache()
    kv = options["num_kv_blocks"] * shard.kv_bytes_per_block(config.cache.block_size)
    return {"weights": worker.weight_bytes, "kv": kv, "peak": peak_memory_bytes()}


def main(words: list[str]) -> None:
    model, options = words[:2]
    tensor_size, num_stages, index = map(int, words[2:])
    print(json.dumps(load_rank(model, json.loads(options), Place.all(tensor_size, num_stages)[index])))


if __name__ == "__main__":
    main(sys.argv[1:])
