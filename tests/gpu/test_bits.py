"""deterministic=True on a real GPU, operation by operation: which one, if any, gives a row other bits elsewhere."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.slices import Slices
    from quire.kernels.types import HeadShape
    from tests.kernels.triton import bits, cases

DTYPES = ("float32", "bfloat16")
ROWS = 700
COUNTS = (1, 2, 3, 7, 8, 9, 31, 33, 64, 65, 130, 512, 513)
SLICES = (("of_heads", 9, 64), ("of_heads", 32, 128), ("of_heads", 6, 80), ("of_width", 1536), ("of_width", 3040))
HEADS = ((16, 8, 128), (9, 3, 64), (4, 1, 256), (6, 2, 16))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "features"), [(1024, 3072), (576, 1536), (48, 97), (5120, 640)])
@torch.inference_mode()
def test_norms_gemms_and_gates(dtype: str, hidden: int, features: int) -> None:
    checks = bits.row_wise("cuda", getattr(torch, dtype), ROWS, hidden, features)
    assert [line for name, part in checks for line in bits.differences(name, part, ROWS, COUNTS)] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slices", SLICES)
@torch.inference_mode()
def test_slices_give_the_same_bits_for_any_number_of_ranks(dtype: str, slices: tuple[str, int, int]) -> None:
    make, *sizes = slices
    cases.check_linear_slices("cuda", getattr(torch, dtype), 300, 1000, getattr(Slices, make)(*sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [97, 49152, 151936])
@torch.inference_mode()
def test_logits_and_log_probabilities(dtype: str, vocab: int) -> None:
    kind = getattr(torch, dtype)
    ops = bits.deterministic_ops("cuda", kind)
    head = ops.pack_linear(torch.randn(vocab, 576, device="cuda") / 24)
    hidden = torch.randn(300, 576, device="cuda").to(kind)
    counts = (1, 2, 17, 64, 65, 256)
    assert bits.differences("head", lambda a, b: [ops.linear(hidden[a:b].clone(), head)], 300, counts) == []
    checks = bits.logits("cuda", kind, 300, vocab)
    assert [line for name, part in checks for line in bits.differences(name, part, 300, counts)] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@torch.inference_mode()
def test_rotations_and_the_cache(dtype: str, heads: tuple[int, int, int]) -> None:
    checks = bits.rotations("cuda", getattr(torch, dtype), ROWS, HeadShape(*heads))
    assert [line for name, part in checks for line in bits.differences(name, part, ROWS, COUNTS)] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "window", "softcap"),
    [*((heads, None, None) for heads in HEADS), (HEADS[0], 100, None), (HEADS[3], 24, None), (HEADS[0], None, 30.0)],
)
@torch.inference_mode()
def test_attention_in_chunks(
    dtype: str, heads: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    part = bits.attention("cuda", getattr(torch, dtype), ROWS, HeadShape(*heads), window, softcap)
    assert bits.differences(f"attention {heads} {window} {softcap}", part, ROWS, COUNTS) == []


@torch.inference_mode()
def test_the_measure_would_show_a_gemm_that_depends_on_its_batch() -> None:
    """The library's own GEMM does: if no batch of any size shows it, the comparison above is blind."""
    weight, rows = torch.randn(3072, 4096, device="cuda"), torch.randn(ROWS, 4096, device="cuda")
    kind = torch.bfloat16
    part = lambda a, b: [torch.mm(rows[a:b].to(kind), weight.to(kind).t())]  # noqa: E731
    assert bits.differences("library", part, ROWS, COUNTS) != []
