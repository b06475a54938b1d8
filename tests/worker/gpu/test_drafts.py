"""On the device a draft is a row of the decode step: its tokens are those of the plain worker without drafts."""

from __future__ import annotations

from typing import Any

import pytest

from quire.scheduler.request import Request
from tests.worker.gpu.engines import GEMMA3, QWEN3, make_engine, run, workload


def looping(count: int = 12) -> list[Request]:
    """Prompts that repeat themselves, so that there is something to guess."""
    requests = workload(3, count)
    for i, request in enumerate(requests):
        request.prompt_token_ids = [7 + i, 8, 9, 10 + i] * 6
        request.sequences.clear()
        request.__post_init__()
    return requests


@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["full", "windows"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [1, 4])
def test_tokens_and_logprobs_with_drafts_are_those_without(config: dict[str, Any], depth: int, drafts: int) -> None:
    plain = run(make_engine(config, device=False), looping())
    core = make_engine(config, device=True, depth=depth, drafts=drafts)
    found = run(core, looping())
    assert {name: one[0] for name, one in found.items()} == {name: one[0] for name, one in plain.items()}
    assert {name: one[3] for name, one in found.items()} == dict.fromkeys(plain)
    for name, one in found.items():
        assert [entry.token_id for entry in one[1]] == [entry.token_id for entry in plain[name][1]]
    speculator = core.scheduler.speculator
    assert speculator is not None
    assert sum(speculator.stats.accepted) > 0
    assert sum(speculator.stats.offered) > sum(speculator.stats.accepted)
    core.scheduler.check()
    core.close()
