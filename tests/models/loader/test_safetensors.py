"""Weights of a Hugging Face folder: whole, sharded, and broken in the ways downloads break."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ModelLoadError
from quire.models.loader.safetensors import iterate_weights, weight_files

TENSORS = {f"layer.{i}.weight": torch.randn(8, 16) for i in range(4)}


def sharded(folder: Path) -> Path:
    names = list(TENSORS)
    save_file({n: TENSORS[n] for n in names[:2]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: TENSORS[n] for n in names[2:]}, folder / "model-00002-of-00002.safetensors")
    weight_map = {n: f"model-0000{1 + (i > 1)}-of-00002.safetensors" for i, n in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def point_at(folder: Path, file: str) -> None:
    index = {"weight_map": {"layer.0.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_one_file_gives_every_tensor(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = dict(iterate_weights(tmp_path, None))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_shards_give_every_tensor(tmp_path: Path) -> None:
    found = dict(iterate_weights(sharded(tmp_path), torch.float32))
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(stored: torch.dtype, tmp_path: Path) -> None:
    save_file({"w": TENSORS["layer.0.weight"].to(stored)}, tmp_path / "model.safetensors")
    ((_, tensor),) = iterate_weights(tmp_path, torch.float32)
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, TENSORS["layer.0.weight"].to(stored).float())


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors .* missing"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "target", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b"]
)
def test_an_index_that_leaves_its_folder_is_refused(target: str, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    point_at(inner, target)
    with pytest.raises(ModelLoadError, match="outside its folder"):
        weight_files(inner)


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(2)}, tmp_path / "a.safetensors")
    point_at(tmp_path, "a.safetensors")
    with pytest.raises(ModelLoadError, match=r"layer\.0\.weight"):
        list(iterate_weights(tmp_path, None))


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{}"])
def test_a_broken_index_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        weight_files(tmp_path)


def test_an_empty_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickle"):
        weight_files(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_truncated_and_flipped_files_are_refused_or_read(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(seed)
    for cut in [0, 1, 7, 8, 9, header - 1, header, len(whole) - 1, *rng.sample(range(len(whole)), 20)]:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelLoadError, match="truncated or corrupted"):
            list(iterate_weights(tmp_path, torch.float32))
    for _ in range(60):
        data = bytearray(whole)
        data[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            list(iterate_weights(tmp_path, torch.float32))
        except ModelLoadError:
            pass


def test_eight_bit_floats_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="float8"):
        list(iterate_weights(tmp_path, torch.float32))


def test_tensors_of_no_layer_come_first(tmp_path: Path) -> None:
    """Of every file: an untied head is in the last one, when all layers are packed already."""
    held = [["embed.weight", "layers.0.up.weight"], ["layers.1.up.weight", "head.weight"]]
    for number, names in enumerate(held):
        save_file({name: torch.full((2,), float(number)) for name in names}, tmp_path / f"{number}.safetensors")
    places = {name: f"{number}.safetensors" for number, names in enumerate(held) for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = [(name, int(tensor[0])) for name, tensor in iterate_weights(tmp_path, None)]
    assert found == [("embed.weight", 0), ("head.weight", 1), ("layers.0.up.weight", 0), ("layers.1.up.weight", 1)]


def test_who_keeps_a_small_tensor_does_not_keep_the_file(tmp_path: Path) -> None:
    """The bias of a sum that ranks share is kept as it was read."""
    tensors = {"layers.0.bias": torch.arange(48.0), "layers.0.weight": torch.zeros(4096, 1024)}
    save_file(tensors, tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in iterate_weights(tmp_path, torch.float32) if name.endswith("bias")}
    assert torch.equal(kept["layers.0.bias"], tensors["layers.0.bias"])
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


PEAK = """
import sys
from pathlib import Path
import torch
from quire.machine import peak_memory_bytes
from quire.models.loader.safetensors import iterate_weights
before = peak_memory_bytes()
for name, tensor in iterate_weights(Path(sys.argv[1]), torch.float32, RANGES):
    float(tensor.sum())
print((peak_memory_bytes() - before) >> 20)
"""


@pytest.mark.parametrize(("count", "rows", "ranges", "most"), [
    (24, 2048, "None", 130),  # of 384 MiB
    (1, 49152, "lambda name, shape: (1, ((64, 128),))", 60),  # some columns of 384 MiB: 12 MiB
    (24, 2048, "lambda name, shape: (1, ((64, 128),))", 60),  # and of 24 tensors
    (1, 49152, "lambda name, shape: (0, ((0, 8192),))", 110)])  # 64 MiB of its rows
def test_a_large_file_is_never_in_memory_whole(tmp_path: Path, count: int, rows: int, ranges: str, most: int) -> None:
    save_file({f"w{i}": torch.full((rows, 2048), float(i)) for i in range(count)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", PEAK.replace("RANGES", ranges), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < most, done.stdout
