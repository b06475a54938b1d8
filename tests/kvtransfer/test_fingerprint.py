"""A fingerprint is the same for the same model however it is stored under way, and names what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from quire.config import ModelConfig
from quire.errors import KVMismatchError, KVTransferError
from quire.kvtransfer.fingerprint import Fingerprint, fingerprint, fingerprint_of, tokenizer_digest, weights_digest
from quire.layers.spec import RopeSpec
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("one", "same", "seed", "layers", "rope")}
    make_checkpoint(made["one"])
    make_checkpoint(made["same"])
    make_checkpoint(made["seed"], seed=1)
    make_checkpoint(made["layers"], num_hidden_layers=1)
    make_checkpoint(made["rope"], rope_theta=1234.0)
    return made


def test_what_differs_is_named(folders: dict[str, Path]) -> None:
    made = {name: fingerprint_of(resolve_model(str(folder)), 64, "float32") for name, folder in folders.items()}
    mine = made["one"]
    mine.check(made["same"])
    assert mine.digest == made["same"].digest
    differences = {"seed": "weights", "layers": "model", "rope": "rope"}
    for name, field in differences.items():
        with pytest.raises(KVMismatchError) as refused:
            mine.check(made[name])
        assert refused.value.field == field
        assert mine.digest != made[name].digest
    with pytest.raises(KVMismatchError, match="another tokenizer"):
        mine.check(replace(mine, tokenizer="another"))
    with pytest.raises(KVMismatchError, match="another cache dtype"):
        mine.check(replace(mine, dtype="bfloat16"))
    mine.check(replace(mine, dtype="bfloat16"), convert=True)
    with pytest.raises(KVMismatchError, match="version"):
        mine.check(replace(mine, layout=99))


def test_weights_that_an_engine_rounds_are_others(folders: dict[str, Path]) -> None:
    source = resolve_model(str(folders["one"]))
    ways = [ModelConfig(quantization=how, quantization_group_size=group)
            for how, group in ((None, None), ("int8", 32), ("int8", 64), ("int4", 32), ("file", None))]
    found = [fingerprint_of(source, 64, "float32", rounding=each.rounding) for each in ways]
    assert len({each.weights for each in found}) == len({each.digest for each in found}) == 5
    for other in found[1:]:
        with pytest.raises(KVMismatchError, match="other weights of it"):
            found[0].check(Fingerprint.from_data(other.to_data()))


def test_dummy_weights_are_known_by_their_seed(folders: dict[str, Path]) -> None:
    source = resolve_model(str(folders["one"]), load_format="dummy")
    assert fingerprint_of(source, 64, "float32", 1) != fingerprint_of(source, 64, "float32", 2)
    assert fingerprint_of(source, 64, "float32", 1).weights != fingerprint_of(
        resolve_model(str(folders["one"])), 64, "float32", 1).weights


def test_a_longrope_depends_on_how_long_sequences_may_be(folders: dict[str, Path]) -> None:
    spec = read_spec(resolve_model(str(folders["one"])).config)
    rope = RopeSpec(500.0, 8, "longrope", original_max_positions=32, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)
    long = replace(spec, ropes=(rope,))
    at = {length: fingerprint(long, length, "w", "t", "float32").rope for length in (16, 32, 33, 64)}
    assert at[16] == at[32] != at[33] == at[64]
    plain = [fingerprint(spec, length, "w", "t", "float32") for length in (16, 64)]
    assert plain[0] == plain[1]


def test_one_changed_byte_of_a_sample_shows(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    data = bytearray(3 << 20)
    path.write_bytes(data)
    before = weights_digest([path])
    data[(1 << 20) + 100] ^= 1
    path.write_bytes(data)
    assert weights_digest([path]) != before
    path.write_bytes(data[:-1])
    assert weights_digest([path]) != before


def test_tokenizers_are_told_apart() -> None:
    one, other = (Tokenizer(Backend(WordLevel({"a": 0, "b": 1} if order else {"b": 0, "a": 1}, unk_token="a")))
                  for order in (True, False))
    assert tokenizer_digest(one) == tokenizer_digest(one) != tokenizer_digest(other)


def test_a_fingerprint_survives_as_plain_data() -> None:
    mine = Fingerprint("m", "w", "r", "t", 1, "float32")
    data = json.loads(json.dumps(mine.to_data()))
    assert Fingerprint.from_data(data) == mine
    for wrong in (None, {}, {**data, "layout": "1"}, {**data, "rope": 3}, {**data, "layout": True},
                  {**data, "model": "x" * 1000}):
        with pytest.raises(KVTransferError):
            Fingerprint.from_data(wrong)


def test_saying_what_must_be_equal_needs_no_torch() -> None:
    code = "import sys, quire.kvtransfer.fingerprint, quire.kvtransfer.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
