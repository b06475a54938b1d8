"""`quire bench cpu --rivals`: engines take turns in processes of their own, and what fails is named."""

from __future__ import annotations

import pytest

from quire.bench.cpu.case_process import contest
from quire.bench.cpu.cases import Workload, workload
from quire.bench.cpu.command import limit_seconds
from quire.bench.cpu.rivals import shared_prefix
from quire.errors import QuireError
from quire.machine import Ceilings


def test_a_prefix_that_all_prompts_share_is_found_where_it_is_long() -> None:
    assert shared_prefix(workload("D", 1000)) == 512
    assert shared_prefix(workload("B", 1000)) == 0
    assert shared_prefix(workload("C", 1000)) == 0
    assert shared_prefix(Workload([[1, 2, 3], [1, 2, 4]], [1, 1])) == 0


def test_an_engine_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(QuireError, match="case A failed on nobody: KeyError: 'nobody'"):
        contest("nobody", "A", "smollm2-135m", 1)


def test_integers_shorten_the_limit_by_their_bytes_and_their_rate() -> None:
    floats = {"layer_parameters": 1000, "head_parameters": 100, "weight_bytes": 4400, "kv_bytes_per_token": 1,
              "layers": 1, "query_width": 1, "int8_rate": 1}
    integers = {**floats, "weight_bytes": 550, "int8_rate": 4}
    stream, prompt = Workload([[1] * 16], [101]), Workload([list(range(64)), list(range(64, 128))], [1, 1])
    reads, computes = Ceilings(1e6, 1e12), Ceilings(1e12, 1e6)
    assert 7 < limit_seconds(stream, floats, reads) / limit_seconds(stream, integers, reads) < 8
    assert limit_seconds(prompt, floats, computes) == pytest.approx(4 * limit_seconds(prompt, integers, computes))
