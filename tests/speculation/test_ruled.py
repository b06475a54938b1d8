"""Lookups for sequences under a grammar beside a model's drafts on a GPU, as the scheduler asks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.sampling.params import SamplingParams
from quire.speculation.device_speculator import DeviceSpeculator


class Text(SimpleNamespace):
    """In the place of a sequence that decodes, and repeats itself."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def text(row: int, ruled: bool) -> Any:
    tokens = [1, 2, 3, 4, 5, 6, 7] * 30
    request = SimpleNamespace(beams=None, start_grammar=object() if ruled else None, max_len=4000, tenant=None,
                              cache_key=None, params=SamplingParams(), bad_words=None)
    return Text(request=request, row=row, num_pending=0, held_at=None, num_computed=len(tokens) - 1,
                num_prompt_tokens=50, tokens=tokens, num_output_tokens=len(tokens) - 50)


def head(most_in_step: int, pass_seconds: float, hits: bool) -> DeviceSpeculator:
    speculator = DeviceSpeculator(4, gpu=True, own_kv=True, ahead=True)
    speculator.most_in_step = most_in_step
    for size in (1, 2, 3, 5, 8, 16, 32, 64, 128, 256, 512, 1024):
        speculator.times.observe(size, 0.006 + 5e-6 * size)
    speculator.drafting.observe(1, pass_seconds)
    for _ in range(200):
        speculator._odds.add([hits] * 4)
    return speculator


def read(speculator: DeviceSpeculator, sequences: list[Any]) -> None:
    for seq in sequences:
        if seq.request.start_grammar is not None:
            speculator._ruled._lookups._follow(seq)
    for _ in range(400):
        speculator._ruled._lookups.read([])


def drafted(speculator: DeviceSpeculator, sequences: list[Any], ruled: bool) -> int:
    rows = {seq.row for seq in sequences if (seq.request.start_grammar is not None) == ruled}
    found = speculator.choose(sequences, 8192 - len(sequences)).drafts
    return sum(drafts.count for row, drafts in found.items() if row in rows)


def test_lookups_keep_to_the_drafts_of_a_step_while_a_head_rests() -> None:
    speculator = head(512, pass_seconds=0.02, hits=False)
    speculator.overlaps = False
    speculator._next_probe = 1e9
    sequences = [text(row, ruled=row > 0) for row in range(160)]
    assert drafted(speculator, sequences, ruled=False) == 0
    read(speculator, sequences)
    assert speculator._rests(sequences)
    assert 256 < drafted(speculator, sequences, ruled=True) <= 512


def test_lookups_that_take_all_room_do_not_end_drafts_that_pay() -> None:
    speculator = head(64, pass_seconds=0.0001, hits=True)
    speculator.overlaps = False
    speculator._next_probe = 0.5
    sequences = [text(row, ruled=row >= 4) for row in range(24)]
    assert drafted(speculator, sequences, ruled=False) == 16
    read(speculator, sequences)
    assert drafted(speculator, sequences, ruled=True) == 64
    for seq in sequences[4:]:
        speculator._ruled.forget(seq)
        seq.tokens = list(range(1000, 1300))
    assert drafted(speculator, sequences, ruled=False) == 16


def test_a_step_of_rows_under_a_grammar_alone_says_nothing_of_a_models_drafts() -> None:
    speculator = head(512, pass_seconds=0.0001, hits=True)
    free, ruled = text(0, ruled=False), text(1, ruled=True)
    assert drafted(speculator, [free, ruled], ruled=False) == 4
    free.num_pending, speculator._clearly, speculator._since_plain, speculator._next_probe = 1, False, 400, 0.5
    assert speculator.choose([free, ruled], 512).waiting == set(), "its step without drafts is under way"
    speculator._since_plain = 0
    assert speculator.choose([free, ruled], 512).waiting == {0}
