"""Two engines in one process, one of which computes prompts on a thread of its own for the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire import LLM

SECRET = "a secret of the tests, long enough"


class PrefillEngine:
    """An engine that computes prompts for others on a thread."""

    def __init__(self, model: str, **options: Any) -> None:
        transfer = {"role": "prefill", "lease": 20.0, "transports": "tcp", **options.pop("kv_transfer", {})}
        self.llm = LLM(model, kv_transfer=transfer, **options)
        self.address = str(self.llm.kv_address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.llm.serve_peers, args=(self._stop,), daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int | float]:
        """Its metrics, once all is over; the engine's bookkeeping is sound."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.llm.check()
        found = self.llm.metrics()
        self.llm.close()
        return found


@contextmanager
def pair(model: str, prefill: dict[str, Any], decode: dict[str, Any]) -> Iterator[tuple[PrefillEngine, LLM]]:
    """Needs $QUIRE_KV_SECRET."""
    other = PrefillEngine(model, **prefill)
    transfer = {"role": "decode", "peers": [other.address], "lease": 20.0, "transports": "tcp", "least_tokens": 1,
                **decode.pop("kv_transfer", {})}
    try:
        with LLM(model, kv_transfer=transfer, **decode) as llm:
            yield other, llm
            while llm.has_unfinished_requests():  # a step may still be in flight
                llm.step()
            llm.check()
            found = llm.metrics()
            assert found["kv_blocks_used"] == found["kv_reservations"] == found["kv_prompts_open"] == 0
        found = other.stop()
        assert found["kv_blocks_used"] == found["kv_leases"] == found["kv_prefills_open"] == 0
    finally:
        if other.llm._engine is not None:
            other.stop()


def answers(llm: LLM, prompts: list[list[int]], params: list[Any]) -> list[Any]:
    """Tokens and log-probabilities, to the last bit, of every request."""
    found = llm.generate(prompts, params, use_tqdm=False)
    return [(output.prompt_logprobs, [(each.token_ids, each.logprobs, each.finish_reason) for each in output.outputs])
            for output in found]
