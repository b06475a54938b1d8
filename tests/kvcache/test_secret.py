"""The secret that replicas share: who has it agrees on the names of prefixes, and nobody else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kvcache.prefix import HashChain
from quire.kvcache.secret import derived_secret, secret_name
from quire.kvcache.table import SequenceKV
from quire.options import read_kv_secret


def names(secret: bytes) -> list[bytes]:
    return HashChain(4, derived_secret(secret, "prefix")).extend(SequenceKV(), list(range(12)), 12)


def test_equal_secrets_give_equal_names_and_others_do_not() -> None:
    assert names(b"one secret of many") == names(b"one secret of many")
    assert not set(names(b"one secret of many")) & set(names(b"one secret of mani"))


def test_a_derived_secret_depends_on_its_purpose_and_on_all_of_the_secret() -> None:
    long = b"x" * 200
    assert len({derived_secret(long, "prefix"), derived_secret(long, "name"), derived_secret(long + b"y", "prefix"),
                derived_secret(b"x" * 199, "prefix")}) == 4
    assert secret_name(long) == secret_name(long) != secret_name(long + b"y")


def test_it_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_KV_SECRET", raising=False)
    assert read_kv_secret(None) is None
    monkeypatch.setenv("QUIRE_KV_SECRET", "from the environment\n")
    assert read_kv_secret(None) == b"from the environment"
    file = tmp_path / "secret"
    file.write_text("from the very file\n")
    assert EngineConfig.create(kv_secret_file=str(file)).cache.kv_secret == b"from the very file"


@pytest.mark.parametrize("content", ["", "short", None])
def test_one_that_is_none_is_refused_by_name(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        EngineConfig.create(kv_secret_file=str(file))
    assert refused.value.field == "kv_secret_file"
