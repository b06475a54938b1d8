"""Philox: published vectors, and the same bits from plain Python, from torch and from numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.sampling.philox import Purpose, philox4x32, philox4x32_tensors, signed_seed, uniform, uniforms

ONES = 0xFFFFFFFF
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_matches_the_published_vectors(counter, key, words):
    assert philox4x32(counter, key) == words
    tensors = philox4x32_tensors(
        tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert tuple(int(t) for t in tensors) == words


def test_agrees_with_an_independent_numpy_rendering_in_uint64():
    rng = np.random.default_rng(7)
    counter = rng.integers(0, 1 << 32, (4, 500), dtype=np.uint64)
    key = rng.integers(0, 1 << 32, (2, 500), dtype=np.uint64)
    c, k, low = counter.copy(), key.copy(), np.uint64(ONES)
    for _ in range(10):
        left, right = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = np.stack(
            [
                (right >> np.uint64(32)) ^ c[1] ^ k[0],
                right & low,
                (left >> np.uint64(32)) ^ c[3] ^ k[1],
                left & low,
            ]
        )
        k = (k + np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)) & low
    ours = philox4x32_tensors(
        tuple(torch.from_numpy(x.astype(np.int64)) for x in counter),
        tuple(torch.from_numpy(x.astype(np.int64)) for x in key),
    )
    assert np.array_equal(np.stack([t.numpy() for t in ours]), c.astype(np.int64))


def test_one_draw_and_many_draws_have_the_same_bits():
    rng = random.Random(3)
    seeds = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1] + [rng.getrandbits(64) for _ in range(300)]
    index = [rng.randrange(64) for _ in seeds]
    position = [rng.randrange(1 << 20) for _ in seeds]
    for purpose in Purpose:
        many = uniforms(
            torch.tensor([signed_seed(s) for s in seeds]),
            torch.tensor(index),
            torch.tensor(position),
            purpose,
        )
        assert many.dtype == torch.float64
        assert many.tolist() == [uniform(*args, purpose) for args in zip(seeds, index, position, strict=True)]


def test_draws_lie_in_the_half_open_unit_interval_and_look_uniform():
    n = 200_000
    draws = uniforms(torch.full((n,), 42), torch.zeros(n, dtype=torch.int64), torch.arange(n)).numpy()
    assert draws.min() >= 0.0 and draws.max() < 1.0
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    chi = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert 50 < chi < 170  # 99 degrees of freedom
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


def test_every_coordinate_of_a_draw_matters():
    base = uniform(5, 1, 2, Purpose.SAMPLE)
    others = [
        uniform(6, 1, 2),
        uniform(5 + (1 << 32), 1, 2),
        uniform(5, 2, 2),
        uniform(5, 1, 3),
        uniform(5, 1, 2, Purpose.DRAFT),
    ]
    assert len({base, *others}) == 6
