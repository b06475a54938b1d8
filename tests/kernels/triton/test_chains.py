"""What chains of drafts become when they are judged: the tokens to compute next, as in plain torch."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels import step_reference
from quire.kernels.triton import chains

SPAN, DRAFTS = 5, 4


def check_chains(device: str) -> None:
    rng, ints = random.Random(3), {"dtype": torch.int32, "device": device}
    given, ids, drawn, wanted = [], [0], [[3, 0]], []
    for row in [2, 0, 7, -1, 5, 1, 3, 9, 8]:
        count = rng.randrange(1, DRAFTS + 1)
        accepted = rng.randrange(count + 1)
        position = rng.randrange(3, 50)
        drafts = [rng.randrange(100) for _ in range(count)]
        said = [[token, 0] for token in (*drafts, 50)]
        if accepted < count:  # refused by its token, or since nothing could be drawn there
            said[accepted] = [drafts[accepted], 1] if rng.random() < 0.4 else [100, 0]
        given.append([row, position, len(ids), count])
        drawn += said
        ids += [7, *drafts]
        places = [position + i for i in range(accepted + 1)] if row >= 0 else []
        padding = [-1] * (SPAN - len(places))
        wanted.append(([*padding, *[row] * len(places)], [*[0] * len(padding), *places]))
    ring, results = torch.tensor([1], **ints), torch.full((2, len(ids) + 3, 2), -3, **ints)
    results[1, : len(drawn)] = torch.tensor(drawn, **ints)
    for module in (chains, step_reference):
        rows, positions = (torch.full((len(given) * SPAN + 4,), 9, **ints) for _ in range(2))
        module.follow_chains(torch.tensor(given, **ints), torch.tensor(ids, device=device), results, ring, rows,
                             positions, 0, SPAN)
        found = list(zip(rows[:-4].view(-1, SPAN).tolist(), positions[:-4].view(-1, SPAN).tolist(), strict=True))
        assert found == wanted
        assert rows[-4:].tolist() == positions[-4:].tolist() == [9] * 4


def test_chains_go_on_behind_what_was_accepted() -> None:
    check_chains("cpu")
