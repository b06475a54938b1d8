"""The hostile soak, short: ordinary requests are served beside attacks, and a lost engine is told from a failure."""

from __future__ import annotations

import json
import time
from pathlib import Path

from quire.bench.soak.hostile import Killings, Ordinary, _report, hostile_soak
from tests.structured.tiny import make_model


def test_ordinary_clients_are_served_beside_hostile_ones(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    options = {"model": str(folder), "load_format": "dummy", "executor": "dummy", "device": "cpu",
               "num_threads": 1}
    began = time.monotonic()
    found = hostile_soak(6.0, 0, 1, options)
    assert found["wrong"] == [] and found["failed"] == 0
    assert found["ordinary_served"][0] > 0 and found["ordinary_served"][1] > 0
    assert 0.0 < found["largest_loop_lag_s"][1] < 60.0
    assert {"grammar_bomb", "endless_header", "broken_http", "abandoned_stream"} <= set(found["attacks"])
    assert time.monotonic() - began < 180


def test_what_fails_outside_of_killed_engines_is_wrong() -> None:
    killings = Killings(1, [[10.0, 20.0]])
    assert killings.touch(5.0, 11.0) and killings.touch(19.0, 30.0) and not killings.touch(20.5, 30.0)
    attacked = Ordinary(served=5, lost=2)
    attacked.failed["status 500"] += 3
    found = _report(Ordinary(longest=0.1), attacked, killings, {}, (1 << 20, 200 << 20), False)
    assert found["wrong"] == [
        "3 × status 500", "memory grew from 1 to 200 MiB", "the server was not healthy in the end"]
    assert found["failed"] == 3 and found["lost_in_killed_engines"] == 2
