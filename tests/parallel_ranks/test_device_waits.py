"""Who waits for a GPU on the host, without one."""

from __future__ import annotations

import pytest

from quire.parallel import device_waits
from quire.parallel.device_waits import Waiting


def test_one_who_has_waited_long_is_seen_though_another_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and drafts are waited for on two threads, which begin and end as they like."""
    clock = [10.0]
    monkeypatch.setattr(device_waits.time, "monotonic", lambda: clock[0])
    waiting = Waiting()
    assert not waiting and waiting.seconds == 0.0
    first, second = waiting.one(), waiting.one()
    first.__enter__()
    clock[0] = 13.0
    second.__enter__()
    clock[0] = 14.0
    assert waiting.seconds == 4.0
    first.__exit__(None, None, None)
    assert waiting and waiting.seconds == 1.0
    second.__exit__(None, None, None)
    assert not waiting and waiting.seconds == 0.0
