"""A rank reads its own rows and columns of weights that several tensors make, and gets the part of the whole weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelLoadError
from quire.kernels.quantized import CodedWeight
from quire.models.build import stored_parts
from quire.models.loader.members import MemberCut
from quire.models.loader.source import ModelSource, resolve_model
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.models.stored_parts import StoredParts
from quire.parallel.place import Place
from tests import fp8_checkpoints
from tests.integer_checkpoints import AWQ, GPTQ, Packer, awq, compressed, compressed_config, gptq, write_checkpoint

ASYMMETRIC = compressed_config(symmetric=False)
KINDS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "awq": (awq(), AWQ),
    "awq, 64": (awq(64), AWQ | {"group_size": 64}),
    "gptq": (gptq(), GPTQ),
    "gptq, 64, zero points": (gptq(4, 64, symmetric=False), GPTQ | {"group_size": 64, "sym": False}),
    "gptq, 8 bits": (gptq(8), GPTQ | {"bits": 8}),
    "gptq, one group a row": (gptq(group=-1), GPTQ | {"group_size": -1}),
    "gptq in floats": (gptq(group=8), GPTQ | {"group_size": 8}),
    "compressed": (compressed(), compressed_config()),
    "compressed, zero points": (compressed(symmetric=False), ASYMMETRIC),
    "compressed, one scale a row": (compressed(group=-1), compressed_config(group=-1)),
    "compressed, 8 bits": (compressed(8), compressed_config(8)),
    "w8a8": (compressed(8, -1, plain=True), compressed_config(8, -1, plain=True)),
    "w8a8, zero points": (compressed(8, -1, False, plain=True), compressed_config(8, -1, False, plain=True)),
    **{f"fp8: {kind}": each for kind, each in fp8_checkpoints.KINDS.items()},
}
ORDERED: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq": (gptq(act_order=True), GPTQ | {"desc_act": True}),
    "compressed": (compressed(act_order=True), compressed_config()),
}
WIDE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6}
"""Three ranks' heads begin at 64 and 128, their slices of the MLP inside groups of 64 and blocks of 128."""
SIZES = {"llama": WIDE, "phi3": WIDE | {"num_attention_heads": 12, "num_key_value_heads": 4}}
"""Phi-3 has q, k and v in one tensor, gate and up in another."""


def parts_of(source: ModelSource, size: int) -> Iterator[StoredParts]:
    spec = read_spec(source.config)
    for place in Place.all(size, 1):
        yield stored_parts(source.config, shard_of(spec, place))


def held(weight: Any) -> list[Any]:
    """Everything that a weight is made of."""
    return [type(weight), *(getattr(weight, field.name) for field in fields(weight))] if (
        isinstance(weight, CodedWeight)) else [weight]


def same(mine: Any, other: Any) -> bool:
    if not isinstance(mine, torch.Tensor):
        return bool(mine == other)
    if mine.dtype is torch.float8_e4m3fn:
        mine, other = mine.view(torch.uint8), other.view(torch.uint8)
    return mine.dtype is other.dtype and torch.equal(mine, other)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("kind", [*KINDS, "act-order"])
def test_what_is_read_makes_the_part_of_the_whole_weight(
    kind: str, size: int, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last field: the same codes, scales, groups and zero points, so that the same kernels multiply them."""
    write_checkpoint(tmp_path, *(ORDERED["gptq"] if kind == "act-order" else KINDS[kind]), family, **SIZES[family])
    source = resolve_model(str(tmp_path))
    for parts in parts_of(source, size):
        with monkeypatch.context() as patch:
            patch.setattr("quire.models.loader.members._ROWS_AT_ONCE", 7)
            patch.setattr("quire.models.loader.integer_weights._NUMBERS_AT_ONCE", 100)
            found = dict(source.stored_weights(parts))
        with monkeypatch.context() as patch:
            patch.setattr(MemberCut, "fits", lambda self, shapes: False)  # read whole, then cut
            expected = dict(source.stored_weights(parts))
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            pairs = zip(held(weight), held(expected[name]), strict=True)
            assert all(same(mine, other) for mine, other in pairs), (name, held(weight), held(expected[name]))


class Counted:
    """A file of safetensors, and the bytes that were taken out of it, by the names of tensors."""

    def __init__(self, opened: Any, read: dict[str, int]) -> None:
        self._opened, self._read = opened, read

    def __enter__(self) -> Counted:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._opened.keys())

    def took(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._read[name] = self._read.get(name, 0) + tensor.nbytes
        return tensor

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.took(name, self._opened.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        file, part = self, self._opened.get_slice(name)

        class Slice:
            def get_shape(self) -> list[int]:
                return list(part.get_shape())

            def __getitem__(self, index: Any) -> torch.Tensor:
                return file.took(name, part[index])

        return Slice()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that were read of each tensor since it was cleared."""
    found: dict[str, int] = {}
    opened = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *at, **how: Counted(opened(*at, **how), found))
    return found


def bytes_of(source: ModelSource, parts: StoredParts | None, read: dict[str, int]) -> dict[str, int]:
    read.clear()
    for _ in source.stored_weights(parts):
        pass
    return {name: count for name, count in read.items() if count}


SMALL = ("qzeros", "weight_zero_point", "weight_shape", "g_idx", "input_scale")
"""Members that ranks read whole: one number for many weights."""


@pytest.mark.parametrize("at_once", [16 << 20, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_read_their_shares_and_no_more(
    kind: str, at_once: int, read: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, whose borders cut no group and no block of what they share: together the file, once."""
    monkeypatch.setattr("quire.models.loader.safetensors.READ_BYTES", at_once)
    write_checkpoint(tmp_path, *KINDS[kind], hidden_size=256, intermediate_size=512, num_hidden_layers=1,
                     num_attention_heads=4, num_key_value_heads=4, head_dim=64)
    source = resolve_model(str(tmp_path))
    whole = bytes_of(source, None, read)
    shares = [bytes_of(source, parts, read) for parts in parts_of(source, 2)]
    stored = load_file(tmp_path / "model.safetensors")
    codes = 0
    for name, tensor in stored.items():
        if "_proj." not in name or name.endswith(SMALL):
            continue
        by_columns = "o_proj" in name or "down_proj" in name
        groups = tensor.shape[0] if name.endswith("scales") else tensor.shape[1] if tensor.dim() == 2 else 1
        one_for_all = tensor.numel() == 1 or (by_columns and groups == 1)
        assert whole[name] == tensor.nbytes
        assert [share[name] for share in shares] == [tensor.nbytes // (1 if one_for_all else 2)] * 2, name
        codes += not one_for_all and "scale" not in name
    assert codes == 7


def test_a_border_inside_a_block_reads_the_blocks_it_touches(read: dict[str, int], tmp_path: Path) -> None:
    """192 rows of q are a block and a half; of 320 columns of `down` 160 are each rank's."""
    write_checkpoint(tmp_path, *fp8_checkpoints.KINDS["blocks"], **WIDE)
    source = resolve_model(str(tmp_path))
    first, second = (bytes_of(source, parts, read) for parts in parts_of(source, 2))
    q, down = (f"model.layers.0.{part}.weight" for part in ("self_attn.q_proj", "mlp.down_proj"))
    assert (first[q], second[q]) == (128 * 192, 192 * 192)
    assert (first[f"{q}_scale_inv"], second[f"{q}_scale_inv"]) == (1 * 2 * 4, 2 * 2 * 4)
    assert (first[down], second[down]) == (192 * 256, 192 * (320 - 128))
    assert (first[f"{down}_scale_inv"], second[f"{down}_scale_inv"]) == (2 * 2 * 4, 2 * 2 * 4)


@pytest.mark.parametrize("kind", ORDERED)
def test_of_act_order_rows_are_read_apart_and_columns_together(
    kind: str, read: dict[str, int], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, *ORDERED[kind])
    source = resolve_model(str(tmp_path))
    whole = bytes_of(source, None, read)
    for parts in parts_of(source, 2):
        share = bytes_of(source, parts, read)
        for name in whole:
            if name.endswith(("qweight", "weight_packed")):
                cut_by_columns = "o_proj" in name or "down_proj" in name
                assert share[name] * (1 if cut_by_columns else 2) == whole[name], name


def test_a_rank_refuses_members_that_do_not_fit_each_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, awq(), AWQ)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.qzeros"
    stored[name] = stored[name][:-1].contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"down_proj\.qzeros.*scales of shape \(4, 64\)"):
        dict(source.stored_weights(next(parts_of(source, 2))))


def test_ranges_are_widened_to_whole_steps_and_found_again() -> None:
    cut = MemberCut((640, 64), (0, ((0, 100), (130, 200), (600, 640))), {"codes": ((1, 8), (0, 1)),
                                                                      "scales": ((0, 128), (1, 128))}, 128)
    assert cut.read == [(0, 256), (512, 640)] and cut.read_shape == (384, 64)
    assert cut.rest == (0, ((0, 100), (130, 200), (344, 384)))
    assert cut.of(cut.axes["codes"]) == (1, ((0, 256), (512, 640)))
    assert cut.of(cut.axes["scales"]) == (0, ((0, 2), (4, 5)))
    assert cut.fits({"codes": (8, 640), "scales": (5, 1)}) and not cut.fits({"codes": (8, 640), "scales": (5, 2)})
