"""What must be equal for KV of one engine to be understood by another: model, weights, rope, tokenizer, layout, dtype.

Nothing here imports torch. Files of weights are read from all over: a fine-tune of a model gives other KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from quire.errors import KVMismatchError, KVTransferError, ModelLoadError
from quire.kvtransfer.layout import LAYOUT_VERSION
from quire.models.loader.source import ModelSource
from quire.models.registry import read_spec
from quire.models.spec import DecoderSpec, RopeSpec
from quire.tokenizer.tokenizer import Tokenizer

_PIECE_BYTES: Final = 1 << 22
_SAMPLE_BYTES: Final = 1 << 18
_READ_WHOLE: Final = 1 << 32
"""Files up to this size are read whole."""
_DIGEST: Final = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests in hex, so that a difference can be named without telling what the other side has."""

    model: str
    """The architecture's numbers: layers, heads, norms, windows."""
    weights: str
    rope: str
    """Every rotation, and which factors of a longrope are used: those depend on the option `max_model_len`."""
    tokenizer: str
    layout: int
    """Version of the wire form."""
    dtype: str
    """Element type of the cache."""

    def to_data(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_data(cls, data: object) -> Fingerprint:
        if not isinstance(data, Mapping):
            raise KVTransferError("a fingerprint must be an object")
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = data.get(field.name)
            wanted = int if field.name == "layout" else str
            if not isinstance(value, wanted) or isinstance(value, bool) or len(str(value)) > 128:
                raise KVTransferError(f"a fingerprint without a proper {field.name!r}")
            values[field.name] = value
        return cls(**values)

    def check(self, theirs: Fingerprint, convert: bool = False) -> None:
        """Raise KVMismatchError, which names the first field that differs. `convert`: another cache dtype will do."""
        for name, words in _DIFFERENCES.items():
            mine, other = getattr(self, name), getattr(theirs, name)
            if mine != other and not (name == "dtype" and convert):
                raise KVMismatchError(f"{words}: the other engine has {other}, this one {mine}", name)

    @property
    def digest(self) -> bytes:
        """All of it in 16 bytes, for keys of a pool."""
        return _hash(repr(self.to_data())).digest()


_DIFFERENCES: Final = {
    "layout": "another version of the KV layout",
    "model": "another model",
    "weights": "another model, or other weights of it",
    "rope": "another rope",
    "tokenizer": "another tokenizer",
    "dtype": "another cache dtype",
}


def fingerprint(spec: DecoderSpec, max_model_len: int | None, weights: str, tokenizer: str, dtype: str) -> Fingerprint:
    """`max_model_len` is the option; `weights` is from `weights_used`, `tokenizer` from `tokenizer_digest`; `dtype` is
    the cache's (`KVStore.layout.dtype`)."""
    model = _hash(repr(replace(spec, ropes=()))).hexdigest()
    asked_len = spec.asked_len(max_model_len)
    rope = _hash(repr([_rope_in_use(each, asked_len) for each in spec.ropes])).hexdigest()
    return Fingerprint(model, weights, rope, tokenizer, LAYOUT_VERSION, dtype)


def fingerprint_of(source: ModelSource, max_model_len: int | None, dtype: str, seed: int = 0,
                   rounding: object = None) -> Fingerprint:
    """Of a model as an engine has it. `seed` is that of dummy weights; `rounding`: how weights become integers."""
    weights = weights_used(source, seed, rounding)
    try:
        tokenizer = tokenizer_digest(source.tokenizer())
    except ModelLoadError:
        tokenizer = "none"
    return fingerprint(read_spec(source.config), max_model_len, weights, tokenizer, dtype)


def _rope_in_use(rope: RopeSpec, asked_len: int) -> RopeSpec:
    """A longrope turns all keys by its short factors or all by its long ones: the others do not matter."""
    if rope.kind != "longrope":
        return rope
    return replace(rope, short_factors=rope.factors(asked_len), long_factors=())


def weights_used(source: ModelSource, seed: int, rounding: object = None) -> str:
    """What an engine multiplies by: rounded weights give other KV than those of the file."""
    stored = dummy_digest(seed) if source.is_dummy else weights_digest(source.weight_files())
    return stored if rounding is None else f"{stored} as {rounding}"


def dummy_digest(seed: int) -> str:
    return f"dummy-{seed}"


def weights_digest(files: Iterable[Path]) -> str:
    """Of files of weights in their order: sizes and content; of large files, which would take seconds, the beginning
    of every piece."""
    digest = xxhash.xxh3_128(b"weights")
    for path in files:
        try:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            buffer = memoryview(bytearray(_PIECE_BYTES if size <= _READ_WHOLE else _SAMPLE_BYTES))
            with open(path, "rb", buffering=0) as file:
                for offset in range(0, size, _PIECE_BYTES):
                    file.seek(offset)
                    digest.update(buffer[: file.readinto(buffer)])
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Of everything that turns text into ids."""
    return _hash(tokenizer.backend.to_str()).hexdigest()


def _hash(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST)
