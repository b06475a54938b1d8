"""Decode attention over latents by TMA and wgmma, run by our interpreter, which also checks how its warps wait."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.triton import latent_hopper, latent_hopper_kernel
from quire.kernels.triton.latent_hopper import fits
from quire.kernels.types import LatentShape
from tests.kernels.triton.gluon_interpreter import interpreting
from tests.kernels.triton.gluon_memory import ProtocolError
from tests.kernels.triton.latent_cases import hopper_difference

OLDER = ("tables", "rows", "context_len", "task_seq", "task_piece", "piece_count", "piece_length")
"""Parameters that the previous kernel does not write."""
FEW, MIDDLE, MANY = LatentShape(4, 128, 64), LatentShape(24, 128, 64), LatentShape(128, 128, 64)


def interpreted(*given: Any, seed: int | None = None, backwards: bool = False, **options: Any) -> float:
    """The difference from the reference, of programs in this order and warps in an interleaving of this seed."""
    order = (lambda n: reversed(range(n))) if backwards else range
    with interpreting(order, seed, OLDER):
        return hopper_difference("cpu", *given, **options)


@pytest.mark.parametrize(
    ("shape", "page", "lengths", "extra", "options"),
    [
        (FEW, 16, [1, 200, 0, 77, 300], 8, {}),
        (FEW, 8, [1, 200, 64, 300], 1, {"seed": 1, "backwards": True, "dtype": torch.float16}),
        (FEW, 128, [130, 65], 3, {"rows": True, "seed": 2}),
        (MIDDLE, 24, [150], 1, {"seed": 3}),
        (MANY, 64, [130, 64], 3, {"seed": 2}),
        (MANY, 16, [300, 13], 3, {"backwards": True, "rows": True}),
    ],
)
def test_decode_agrees(shape: LatentShape, page: int, lengths: list[int], extra: int, options: dict) -> None:
    assert interpreted(shape, page, lengths, extra, **options) < 4e-3


def test_lengths_and_splits_of_any_kind_agree() -> None:
    chance = random.Random(3)
    for seed in range(6):
        lengths = [chance.choice((1, 63, 64, 65, 128, chance.randrange(400))) for _ in range(3)]
        found = interpreted(FEW, 16, [*lengths, 5], chance.randrange(1, 12), seed=seed, backwards=bool(seed % 2))
        assert found < 4e-3, (seed, lengths)


_FREED = "            gl.thread_barrier()\n            mbarrier.arrive(free.index(stage))\n"
_WAITED = "            acc = warpgroup_mma_wait(0, deps=(acc,))\n"
MUTATIONS = {
    "queries without a fence": ("        fence_async_shared()\n        gl.thread_barrier()\n        maximum",
                                "        maximum", "stored without a fence"),
    "weights without a fence": ("                fence_async_shared()\n", "", "stored without a fence"),
    "zeros without a fence": ("    fence_async_shared()\n\n\n@gluon.jit\ndef _store_q", "\n\n@gluon.jit\ndef _store_q",
                              "stored without a fence"),
    "unused slots count": ("if left < KEYS:", "if left < 0:", None),
    "free before it is read": (_WAITED + _FREED, _FREED + _WAITED, "still reads"),
    "filled before it is free": ("pred=tile >= STAGES", "pred=tile > STAGES", "is come to again"),
    "before its turn": ("            gdc_wait()\n        for", "            pass\n        for", "before gdc_wait"),
    "a box too few": ("BYTES: gl.constexpr = BOXES", "BYTES: gl.constexpr = (BOXES - 1)", "bytes asked for"),
    "not published": ("        gl.thread_barrier()\n        if gl.atomic", "        if gl.atomic", "does not publish"),
    "joined too early": ("== pieces - 1", "== pieces - 2", "a race"),
    "a count left behind": ("            gl.store(arrived + seq * BLOCKS + head, 0)\n", "", None),
    "the maximum forgotten": ("shrink = gl.exp2(maximum - higher)", "shrink = gl.exp2(higher - higher)", None),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_wrong_word_in_the_kernel_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, complaint = MUTATIONS[name]
    text = Path(str(latent_hopper_kernel.__file__)).read_text()
    assert text.count(old) == 1
    (tmp_path / "mutated.py").write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutated_latent_kernel", tmp_path / "mutated.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(latent_hopper, "latent_kernel", module.latent_kernel)
    with pytest.raises(AssertionError if complaint is None else ProtocolError, match=complaint):
        for shape, lengths, extra in ((FEW, [330, 70], 1), (FEW, [300], 3), (MANY, [70], 1)):
            assert interpreted(shape, 16, lengths, extra, seed=1) < 4e-3


def test_models_and_caches_that_it_serves() -> None:
    half = torch.bfloat16
    assert fits(LatentShape(128, 512, 64), half, 16) and fits(LatentShape(6, 512, 64), torch.float16, 8)
    assert not fits(LatentShape(128, 512, 64), torch.float32, 16)
    assert not fits(LatentShape(128, 512, 32), half, 16) and not fits(LatentShape(128, 384, 64), half, 16)
    assert not fits(LatentShape(128, 512, 64), half, 4) and not fits(LatentShape(128, 512, 64), half, 1)
