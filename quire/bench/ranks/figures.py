"""`quire bench parallel --figures`: everything that is asked of ranks on a CPU, each with its limit, in one run.

Qwen3-0.6B's shapes have random weights, and in case B a quarter of the layers and of the vocabulary."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.bench.gpu.cases import MODELS
from quire.bench.ranks.control_plane import control_plane
from quire.bench.ranks.exchange import exchange_times
from quire.bench.ranks.rank_memory import rank_memory
from quire.bench.ranks.speeds import speeds

SPEED = 0.85
"""Of one process with as many threads."""
MICROSECONDS = 100.0
"""From `submit` to the last rank's start, with two ranks, in the median."""
BEYOND_BYTES = 400_000_000
"""That a rank may take while it loads, beyond its share of weights and KV."""
_TENSOR, _STAGES = "2x1", "1x2"
_ROUNDS = {"A": 5, "B": 3, "C": 5}
_SMOL = "smollm2-135m"


def figures() -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    for ranks in (1, 2):
        line = control_plane(ranks, 256, 400)
        yield {**line, "limit": MICROSECONDS, "holds": line["median"] < MICROSECONDS} if ranks == 2 else line
    yield exchange_times(2)
    with tempfile.TemporaryDirectory() as folder:
        whole, quarter = _qwen3(Path(folder) / "qwen3-0.6b", 1), _qwen3(Path(folder) / "qwen3-0.6b-quarter", 4)
        for model, load_format in ((_SMOL, "auto"), (whole, "dummy")):
            for tensor, stages in ((2, 1), (1, 2)):
                for line in rank_memory(model, tensor, stages, load_format):
                    beyond = line["peak"] - line["weights"] - line["kv"]
                    yield {**line, "beyond": beyond, "limit": BEYOND_BYTES, "holds": beyond <= BEYOND_BYTES}
        for case in "ABC":
            sizes = [_TENSOR, _STAGES] if case == "B" else [_TENSOR]
            for model, load_format in ((_SMOL, "auto"), (quarter if case == "B" else whole, "dummy")):
                for line in speeds(case, model, load_format, sizes, _ROUNDS[case]):
                    ratio = line.get("speed_to_one_process") if line["size"] in sizes else None
                    yield line if ratio is None else {**line, "limit": SPEED, "holds": ratio >= SPEED}
    yield {"bench": "parallel", "case": "figures", "seconds": round(time.monotonic() - began, 1)}


def _qwen3(folder: Path, part: int) -> str:
    """A folder with the shapes of Qwen3-0.6B and no weights; of layers and vocabulary only a part."""
    config = dict(MODELS["0.6b"])
    for name in ("num_hidden_layers", "vocab_size"):
        config[name] //= part
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
