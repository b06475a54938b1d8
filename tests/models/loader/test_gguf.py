"""The GGUF header parser: reads what the gguf package writes, and survives what nobody should write."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelLoadError
from quire.models.loader.gguf import GgufFile, float_value
from quire.models.loader.gguf_names import hf_config
from quire.tokenizer.from_gguf import tokenizer_from_gguf
from tests.models.loader.tiny_gguf import tiny_model, write_gguf


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(
        path, "llama", tiny_model("llama", hidden_size=32, num_hidden_layers=1), "Q8_0"
    ).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken") / "m.gguf"


def header_length(data: bytes, scratch: Path) -> int:
    scratch.write_bytes(data)
    with GgufFile(scratch) as file:
        return min(tensor.offset for tensor in file.tensors.values())


def read_all(path: Path) -> None:
    """Everything a load does with a file, up to the decoder."""
    with GgufFile(path) as file:
        hf_config(file)
        tokenizer_from_gguf(file.metadata)
        for tensor in file.tensors.values():
            file.read(tensor, np.empty(int(np.prod(tensor.shape)), np.float32))


def pack_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def tensor_info(
    name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    shape = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        pack_string(name)
        + struct.pack("<I", len(dims) if rank is None else rank)
        + shape
        + struct.pack("<IQ", kind, offset)
    )


def refuse(path: Path, data: bytes, match: str) -> None:
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=match):
        GgufFile(path)


def test_every_kind_of_metadata_is_read(scratch: Path) -> None:
    writer = gguf.GGUFWriter(scratch, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -5)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**60))
    writer.add_float32("a.f32", 1e-5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "héllo 世界")
    writer.add_array("a.words", ["x", "", "🎉"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(scratch) as file:
        values = file.metadata
    assert (values["a.u8"], values["a.i8"], values["a.u16"], values["a.i16"]) == (200, -3, 60000, -30000)
    assert (values["a.u32"], values["a.i32"], values["a.u64"]) == (4_000_000_000, -5, 2**63)
    assert (values["a.i64"], values["a.f64"], values["a.bool"]) == (-(2**60), 0.1, True)
    assert float_value(values, "a.f32", 0.0) == 1e-5
    assert values["a.text"] == "héllo 世界" and values["a.words"] == ["x", "", "🎉"]
    assert list(values["a.numbers"]) == [1, 2, 3]  # type: ignore[arg-type]


def test_tensors_are_where_the_gguf_package_finds_them(tiny_bytes: bytes, scratch: Path) -> None:
    scratch.write_bytes(tiny_bytes)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(scratch).tensors}
    with GgufFile(scratch) as file:
        assert file.tensors.keys() == theirs.keys()
        for name, tensor in file.tensors.items():
            assert (tensor.offset, tensor.nbytes) == (theirs[name].data_offset, theirs[name].n_bytes)
            assert tensor.shape == tuple(reversed(theirs[name].shape.tolist()))


def test_a_file_cut_anywhere_is_refused(tiny_bytes: bytes, scratch: Path) -> None:
    length = header_length(tiny_bytes, scratch)
    cuts = [
        *range(0, length, max(1, length // 400)),
        length - 1,
        length,
        len(tiny_bytes) // 2,
        len(tiny_bytes) - 40,
    ]
    for cut in cuts:
        scratch.write_bytes(tiny_bytes[:cut])
        with pytest.raises(ModelLoadError):
            GgufFile(scratch)


@pytest.mark.parametrize("seed", range(8))
def test_flipped_header_bytes_never_crash_nor_cost_memory(
    seed: int, tiny_bytes: bytes, scratch: Path
) -> None:
    length = header_length(tiny_bytes, scratch)
    rng = random.Random(seed)
    tracemalloc.start()
    try:
        for _ in range(60):
            data = bytearray(tiny_bytes)
            for _ in range(rng.choice([1, 1, 2, 8])):
                data[rng.randrange(length)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            scratch.write_bytes(data)
            try:
                read_all(scratch)
            except ModelLoadError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_after_the_magic_are_refused(body: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(b"GGUF" + struct.pack("<I", 3) + body)
        file.flush()
        try:
            opened = GgufFile(file.name)
        except ModelLoadError:
            return
        assert not opened.tensors
        opened.close()


HUGE = 2**63


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "ends at byte 0"),
        (b"PK\x03\x04" + bytes(60), "instead of b'GGUF'"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=HUGE), "claims"),
        (header(keys=HUGE), "claims"),
        (header(keys=1) + struct.pack("<Q", HUGE), "string of"),
        (header(keys=1) + pack_string(b"\xff\xfe") + struct.pack("<IB", 0, 1), "not UTF-8"),
        (header(keys=1) + pack_string(b"k") + struct.pack("<I", 99), "unknown type 99"),
        (header(keys=1) + pack_string(b"k") + struct.pack("<IQ", 8, HUGE), "string of"),
        (header(keys=1) + pack_string(b"k") + struct.pack("<IQ", 8, 1000), "truncated"),
        (header(keys=1) + pack_string(b"k") + struct.pack("<IIQ", 9, 4, HUGE), "array of"),
        (header(keys=1) + pack_string(b"k") + struct.pack("<IIQ", 9, 8, 1_000_000), "truncated"),
        (header(keys=1) + pack_string(b"k") + struct.pack("<IIQ", 9, 9, 1), "items of type 9"),
        (header(keys=2) + 2 * (pack_string(b"k") + struct.pack("<IB", 0, 1)), "'k' appears twice"),
        (header(tensors=1) + tensor_info(rank=9), "9 dimensions"),
        (header(tensors=1) + tensor_info(rank=0, dims=()), "0 dimensions"),
        (header(tensors=1) + tensor_info(dims=(0,)), "impossible dimension"),
        (header(tensors=1) + tensor_info(dims=(2**40, 2**40)), "impossible shape"),
        (header(tensors=1) + tensor_info(dims=(2**38,)), "truncated"),
        (header(tensors=1) + tensor_info(kind=77), "type 77"),
        (header(tensors=1) + tensor_info(kind=10), "'t' is in Q2_K; Quire reads F32"),
        (header(tensors=1) + tensor_info(kind=8, dims=(33,)), "no multiple"),
        (header(tensors=1) + tensor_info(offset=3) + bytes(512), "not aligned"),
        (header(tensors=1) + tensor_info(offset=2**62) + bytes(512), "truncated"),
        (header(tensors=2) + 2 * tensor_info() + bytes(512), "'t' appears twice"),
        (header(tensors=2) + tensor_info() + tensor_info(b"u", offset=64) + bytes(512), "overlaps 't'"),
        (header(keys=1) + pack_string(b"general.alignment") + struct.pack("<II", 4, 3), "alignment"),
        (header(keys=1) + pack_string(b"split.count") + struct.pack("<IH", 2, 4), "split"),
    ],
)
def test_a_forged_header_is_refused_with_its_fault(data: bytes, match: str, scratch: Path) -> None:
    refuse(scratch, data, match)


def test_a_file_that_shrinks_after_opening_is_an_error(tiny_bytes: bytes, scratch: Path) -> None:
    scratch.write_bytes(tiny_bytes)
    with GgufFile(scratch) as file:
        tensor = max(file.tensors.values(), key=lambda t: t.offset)
        with open(scratch, "r+b") as cut:
            cut.truncate(tensor.offset + 1)
        with pytest.raises(ModelLoadError, match="shorter"):
            file.read(tensor, np.empty(int(np.prod(tensor.shape)), np.float32))


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_what_is_no_file_is_an_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot open"):
        GgufFile(tmp_path if kind == "folder" else tmp_path / "none.gguf")


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("vocab") / "vocab.gguf"
    tokens = b"".join(pack_string(f"token{i}".encode()) for i in range(49_152))
    merges = b"".join(pack_string(f"to ken{i}".encode()) for i in range(48_900))
    body = header(keys=2)
    body += pack_string(b"tokens") + struct.pack("<IIQ", 9, 8, 49_152) + tokens
    body += pack_string(b"merges") + struct.pack("<IIQ", 9, 8, 48_900) + merges
    path.write_bytes(body)
    yield path


def test_a_49k_vocabulary_is_read_in_less_than_a_second(large_vocabulary: Path) -> None:
    times = []
    for _ in range(3):
        start = time.process_time()
        with GgufFile(large_vocabulary) as file:
            assert len(file.metadata["tokens"]) == 49_152  # type: ignore[arg-type]
        times.append(time.process_time() - start)
    assert min(times) < 1.0
