"""What a rank loads is its part of what one rank alone would load, and it reads nothing else."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.bench.ranks.rank_memory import rank_memory
from quire.cli.inspect_gpu import gpu_facts
from quire.errors import ConfigError, InvariantError, ModelLoadError
from quire.kernels.quantized import CodedWeight, QuantizedWeight
from quire.models.build import dummy_weights, stored_parts
from quire.models.loader.gguf import GgufFile, GgufTensor
from quire.models.loader.gguf_quants import QUANT_FORMATS
from quire.models.loader.source import ModelSource, resolve_model
from quire.models.registry import family_of, read_spec
from quire.models.shard import even_runs, shard_of, stage_layers
from quire.models.stored_parts import NOTHING, take
from quire.parallel.place import Place
from quire.worker.memory import block_bytes
from tests.checkpoints import FAMILY_NAMES, config_of, make_checkpoint, make_model
from tests.models.loader.tiny_gguf import CONFIGS, tiny_model, write_gguf


def check_parts(source: ModelSource, sizes: tuple[int, int]) -> None:
    spec, whole = read_spec(source.config), dict(source.weights())
    seen: set[str] = set()
    for place in Place.all(*sizes):
        parts = stored_parts(source.config, shard_of(spec, place))
        found, stored = dict(source.weights(parts=parts)), dict(source.stored_weights(parts))
        assert found.keys() == stored.keys()
        for name, tensor in whole.items():
            ranges = parts.ranges(name, tuple(tensor.shape))
            if ranges == NOTHING:
                assert name not in found
            else:
                expected = tensor if ranges is None else take(tensor, ranges)
                assert torch.equal(found[name], expected), (place, name)
                kept = stored[name]
                kept = kept.dequantized() if isinstance(kept, CodedWeight) else kept
                assert torch.equal(kept.to(expected.dtype), expected), (place, name)
        seen |= found.keys()
    assert seen == whole.keys()


@pytest.mark.parametrize("arch", CONFIGS)
def test_parts_of_a_gguf(arch: str, tmp_path: Path) -> None:
    check_parts(resolve_model(str(write_gguf(tmp_path / "m.gguf", arch, tiny_model(arch)))), (2, 2))


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_parts_of_quantized_weights(arch: str, quant: str, tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", arch, tiny_model(arch), quant)))
    check_parts(source, (2, 1))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gemma3"])
@pytest.mark.parametrize("at_once", [1 << 20, 500])
def test_parts_of_several_safetensors(
    family: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.models.loader.safetensors.REOPEN_BYTES", at_once)
    make_checkpoint(tmp_path, family, shards=3)
    check_parts(resolve_model(str(tmp_path)), (2, 2))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_random_weights_are_the_same_at_every_size(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.models.random_rows.AT_ONCE", 777)  # so that matrices are made in many pieces
    config = config_of(make_model(family))
    spec, whole = read_spec(config), dict(dummy_weights(config, 5))
    for place in Place.all(2, 2):
        parts = stored_parts(config, shard_of(spec, place))
        for name, tensor in dummy_weights(config, 5, parts):
            ranges = parts.ranges(name, tuple(whole[name].shape))
            assert torch.equal(tensor, whole[name] if ranges is None else take(whole[name], ranges))


RANDOM = """
from quire.machine import peak_memory_bytes
from quire.models.build import dummy_weights, stored_parts
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.parallel.place import Place
import json, sys
config, sizes = json.loads(sys.argv[1]), json.loads(sys.argv[2])
parts = stored_parts(config, shard_of(read_spec(config), Place.all(*sizes)[-1]))
before, largest = peak_memory_bytes(), 0
for name, tensor in dummy_weights(config, 0, parts):
    largest = max(largest, tensor.nbytes)
print((peak_memory_bytes() - before) >> 20, largest >> 20)
"""


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_random_weights_are_made_in_the_type_they_are_kept_in(sizes: tuple[int, int]) -> None:
    """A head of 32M numbers, or half of it, is never there in float32."""
    config = config_of(make_model("llama", hidden_size=48)) | {
        "hidden_size": 1024, "vocab_size": 32768, "torch_dtype": "bfloat16", "head_dim": 8}
    command = [sys.executable, "-c", RANDOM, json.dumps(config), json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    grown, largest = map(int, done.stdout.split())
    assert largest == 64 // sizes[0]
    assert grown < largest + 60, done.stdout


@pytest.mark.parametrize("kind", QUANT_FORMATS)
def test_any_range_of_a_matrix_in_any_format(kind: int, tmp_path: Path) -> None:
    """Borders need not be those of a format's blocks."""
    quant, draw = QUANT_FORMATS[kind], random.Random(kind)
    rows, columns = 7, 3 * max(quant.block_elements, 16)
    stored = np.frombuffer(draw.randbytes(rows * columns // quant.block_elements * quant.block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("m", stored.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "m.gguf") as file:
        tensor = file.tensors["m"]
        assert tensor.shape == (rows, columns)
        whole = np.empty(rows * columns, np.float32)
        file.read(tensor, whole)
        whole = whole.reshape(rows, columns)
        for start, stop in ((0, 3), (2, 7)):
            assert np.array_equal(file.read_range(tensor, 0, start, stop), whole[start:stop], equal_nan=True)
        for start, stop in ((0, columns), (0, 16), (16, columns), (5, columns - 3)):
            assert np.array_equal(file.read_range(tensor, 1, start, stop), whole[:, start:stop], equal_nan=True)
        if quant.coding is not None:
            check_codes(file, tensor, whole)


def check_codes(file: GgufFile, tensor: GgufTensor, whole: np.ndarray) -> None:
    """scale * (code - zero) + offset are the floats, of any rows and of columns cut between groups."""
    coding = tensor.format.coding
    assert coding is not None
    rows, columns = whole.shape
    for dim, start, stop in ((0, 0, rows), (0, 2, 5), (1, 0, columns), (1, coding.group, columns - coding.group)):
        codes, scales, offsets, steps = (
            None if part is None else torch.from_numpy(part) for part in file.read_codes(tensor, dim, start, stop)
        )
        assert codes is not None and scales is not None
        weight = QuantizedWeight(codes, scales, offsets, coding.zero, coding.bits, coding.group)
        expected = whole[start:stop] if dim == 0 else whole[:, start:stop]
        assert int(codes.max()) < 1 << coding.bits
        whole_blocks = dim == 0 or (start, stop) == (0, columns)
        assert (steps is not None) == (bool(coding.steps) and whole_blocks)
        if steps is not None:
            times = (scales.unflatten(1, (steps.shape[1], -1)) / steps[:, :, :1]).nan_to_num(0.0)
            assert torch.equal(times, times.round()) and times.abs().max() <= 128
        assert np.array_equal(weight.dequantized().numpy(), expected, equal_nan=True)
    with pytest.raises(InvariantError, match="cut a group"):
        file.read_codes(tensor, 1, 0, coding.group + 1)


def test_a_rank_reads_its_share_of_the_file_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), "Q8_0")))
    spec, read = read_spec(source.config), [0]
    preadv = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        count = preadv(fd, buffers, offset)
        read[0] += count
        return count

    monkeypatch.setattr(os, "preadv", counting)

    def bytes_of(parts: Any) -> int:
        read[0] = 0
        for _ in source.weights(parts=parts):
            pass
        return read[0]

    whole = bytes_of(None)
    shares = [bytes_of(stored_parts(source.config, shard_of(spec, place))) for place in Place.all(2, 1)]
    norms = sum(tensor.nbytes for name, tensor in source._file.tensors.items()  # type: ignore[attr-defined]
                if "norm" in name)
    # Of every matrix each rank reads its part; the tiny model's key heads are as many as its ranks.
    assert sum(shares) == whole + norms
    assert max(shares) < 0.6 * whole


def test_a_checkpoint_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    config = config_of(model) | {"intermediate_size": 96}
    parts = stored_parts(config, shard_of(read_spec(config), Place(0, 2, 0, 1)))
    with pytest.raises(ModelLoadError, match=r"gate_proj|up_proj|down_proj"):
        for _ in resolve_model(str(tmp_path)).weights(parts=parts):
            pass


def test_a_ranks_peak_is_its_share_and_400_mb() -> None:
    """With Python, torch and everything; the KV pool written to."""
    for rank in rank_memory("smollm2-135m", 2, 1):
        assert 45e6 < rank["weights"] < 55e6 and rank["kv"] == 256 * 16 * 30 * 2 * 2 * 64 * 4
        assert rank["peak"] < rank["weights"] + rank["kv"] + 400e6, rank


WIDE = {"hidden_size": 1024, "intermediate_size": 24576, "num_hidden_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 96, "tie_word_embeddings": True}
"""Three matrices of 25M numbers: two of them wait for each other."""


def write_wide(folder: Path, kind: str) -> str:
    """A checkpoint of such a model in float32, or its config alone."""
    config = config_of(make_model("llama")) | WIDE | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    row = torch.randn(1 << 20)
    if kind == "float32":
        shapes = family_of(config).names.stored(read_spec(config))
        save_file({name: row.repeat(-(-math.prod(shape) // len(row)))[: math.prod(shape)].view(shape)
                   for name, shape in shapes.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(("kind", "options"), [
    ("float32", {"quantization": "int8"}), ("float32", {"quantization": "int4"}), ("float32", {"dtype": "float32"}),
    ("dummy", {"load_format": "dummy"})])
def test_no_weight_is_in_memory_as_it_came_and_packed(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Python and torch are about 190 MB of it; a matrix is 100 in float32."""
    (rank,) = rank_memory(write_wide(tmp_path, kind), 1, 1, num_kv_blocks=16, **options)
    assert rank["weights"] > 40e6
    assert rank["peak"] < rank["weights"] + rank["kv"] + 270e6, rank


# ---- who has what


def test_runs_cover_everything_once_and_differ_by_one() -> None:
    spec = read_spec(config_of(make_model("llama", num_attention_heads=6, intermediate_size=272)))
    for size in range(1, 7):
        shards = [shard_of(spec, place) for place in Place.all(size, 1)]
        heads = [shard.layer(0).heads for shard in shards]
        assert [h.first for h in heads] == [0, *[h.last for h in heads[:-1]]] and heads[-1].last == 6
        assert max(h.last - h.first for h in heads) - min(h.last - h.first for h in heads) <= 1
        for h in heads:
            assert (h.first_kv, h.last_kv) == (h.first // 3, (h.last - 1) // 3 + 1)
        columns = [shard.layer(0).mlp_columns for shard in shards]
        assert columns[0][0] == 0 and columns[-1][1] == 272
        assert [low for low, _ in columns[1:]] == [high for _, high in columns[:-1]]
        runs = shards[0].vocabulary
        assert runs[0][0] == 0 and runs[-1][1] == 97 and all(low < high for low, high in runs)


def test_sizes_that_cannot_be_are_refused_with_those_that_can() -> None:
    spec = read_spec(config_of(make_model("llama")))  # 80 columns: three slices
    with pytest.raises(ConfigError, match="use 1 to 3") as caught:
        shard_of(spec, Place(0, 4, 0, 1))
    assert caught.value.field == "tensor_parallel_size"
    with pytest.raises(ConfigError, match="use 1 to 3") as caught:
        shard_of(spec, Place(0, 1, 0, 4))
    assert caught.value.field == "pipeline_parallel_size"
    with pytest.raises(ValueError, match="place"):
        Place(2, 2, 0, 1)


def test_a_size_beyond_the_experts_is_refused_with_their_ranges() -> None:
    spec = read_spec(config_of(make_model("mixtral", num_local_experts=3)))
    with pytest.raises(ConfigError, match=r"6 query heads, 3 ranges of experts, 97 tokens .*; use 1 to 3") as caught:
        shard_of(spec, Place(0, 4, 0, 1))
    assert "MLP" not in str(caught.value)  # there is none that ranks would share


def test_stages_are_dealt_by_cost() -> None:
    draw = random.Random(0)
    for _ in range(50):
        costs = [draw.choice([1.0, 2.0, 7.0]) for _ in range(draw.randrange(1, 9))]
        count = draw.randrange(1, len(costs) + 1)
        runs = even_runs(costs, count)
        assert [low for low, _ in runs] == [0, *[high for _, high in runs[:-1]]] and runs[-1][1] == len(costs)
        assert all(low < high for low, high in runs)
        dearest = max(sum(costs[low:high]) for low, high in runs)
        assert dearest == best(costs, count)


def best(costs: list[float], count: int) -> float:
    """By trying every way."""
    if count == 1:
        return sum(costs)
    return min(max(sum(costs[:cut]), best(costs[cut:], count - 1)) for cut in range(1, len(costs) - count + 2))


@pytest.mark.parametrize(("tied", "layers_of_head"), [(False, 4), (True, 20)])
def test_the_head_counts_with_a_part_of_what_it_weighs(tied: bool, layers_of_head: int) -> None:
    """With half of it; with a tenth where the first of two stages helps. As dear as so many layers, it leaves the last
    of two stages two layers fewer."""
    layers = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 8,
              "tie_word_embeddings": tied}
    spec = read_spec(config_of(make_model("llama", **layers)))
    layer = sum(np.prod(shape) for name, shape in spec.parameters().items() if name.startswith("layers.0."))
    wide = read_spec(config_of(make_model("llama", **layers, vocab_size=round(layers_of_head * int(layer) / 48))))
    assert stage_layers(spec, 2) == [(0, 4), (4, 8)]
    assert stage_layers(wide, 2) == [(0, 5), (5, 8)]


def test_a_tied_head_counts_with_half_where_no_stage_helps() -> None:
    """On GPUs: what of four layers' weight is a tenth for stages that help is half for these."""
    layers = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 8, "tie_word_embeddings": True}
    small = read_spec(config_of(make_model("llama", **layers)))
    layer = sum(np.prod(shape) for name, shape in small.parameters().items() if name.startswith("layers.0."))
    spec = read_spec(config_of(make_model("llama", **layers, vocab_size=round(4 * int(layer) / 48))))
    assert stage_layers(spec, 2) == [(0, 4), (4, 8)]
    assert stage_layers(spec, 2, stages_help=False) == [(0, 5), (5, 8)]
    shards = [shard_of(spec, place, stages_help=False) for place in Place.all(1, 2)]
    assert [(shard.first_layer, shard.last_layer) for shard in shards] == [(0, 5), (5, 8)]
    assert [shards[0].stage_of(f"layers.{layer}") for layer in (4, 5)] == [0, 1]
    helped = shard_of(spec, Place(0, 1, 0, 2))
    assert block_bytes(shards[0], 16).own == 5 * block_bytes(helped, 16).own // 4
    kept = [rank["kv_bytes_per_token"]["fp8"] for rank in gpu_facts(spec, {}, (1, 2))["ranks"]]
    assert kept[0] * 3 == kept[1] * 5
