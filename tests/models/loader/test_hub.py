"""Fetching from a hub, played by a server on localhost: whole, resumed, from its cache, and refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quire.errors import DownloadError, ModelLoadError
from quire.models.loader.hub import choose_gguf, fetch_from_hub, looks_like_hub_id
from tests.models.loader.fake_hub import fake_hub

FOLDER = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 800,
    "pytorch_model.bin": b"pickle",
    "onnx/model.safetensors": b"elsewhere",
    "README.md": b"hello",
}
QUANTS = {"m-Q4_K_M.gguf": b"4" * 100, "m-Q8_0.gguf": b"8" * 200, "m-IQ1_S.gguf": b"1", "README.md": b""}


def fetch(url: str, cache: Path, model: str = "org/name", prefer_gguf: bool = False) -> Path:
    return fetch_from_hub(model, cache_dir=cache, endpoint=url, progress=False, prefer_gguf=prefer_gguf)


def test_a_folder_is_fetched_without_what_is_not_read(tmp_path: Path) -> None:
    with fake_hub(FOLDER) as hub:
        folder = fetch(hub.url, tmp_path)
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FOLDER["model.safetensors"]


def test_what_was_fetched_is_there_without_the_hub(tmp_path: Path) -> None:
    with fake_hub(FOLDER) as hub:
        first, url = fetch(hub.url, tmp_path), hub.url
    assert fetch(url, tmp_path) == first
    with pytest.raises(DownloadError, match="hf download other/name"):
        fetch(url, tmp_path, "other/name")


def test_a_gguf_that_was_fetched_is_there_without_the_hub(tmp_path: Path) -> None:
    with fake_hub(QUANTS) as hub:
        first, url = fetch(hub.url, tmp_path), hub.url
    assert fetch(url, tmp_path) == first
    with pytest.raises(DownloadError, match="cannot fetch"):
        fetch(url, tmp_path, "org/name:Q4_K_M")


def test_a_dropped_connection_is_resumed(tmp_path: Path) -> None:
    large = bytes(25 << 20)  # the library keeps what it has in pieces of 10 MiB
    with fake_hub({**FOLDER, "model.safetensors": large}) as hub:
        hub.cut_after = 21 << 20
        try:
            fetch(hub.url, tmp_path)
        except DownloadError:
            pass
        hub.cut_after = None
        folder = fetch(hub.url, tmp_path)
        ranges = [
            wanted
            for method, path, wanted in hub.requests
            if method == "GET" and path.endswith("model.safetensors")
        ]
    assert (folder / "model.safetensors").read_bytes() == large
    assert any(wanted and wanted.startswith(f"bytes={20 << 20}-") for wanted in ranges), ranges


def test_a_gguf_repository_gives_one_file(tmp_path: Path) -> None:
    with fake_hub(QUANTS) as hub:
        assert fetch(hub.url, tmp_path / "a").read_bytes() == QUANTS["m-Q8_0.gguf"]
        assert fetch(hub.url, tmp_path / "a", "org/name:q4_k_m").read_bytes() == QUANTS["m-Q4_K_M.gguf"]
        fetched = {path.rsplit("/", 1)[1] for _, path, _ in hub.requests if path.endswith("gguf")}
        assert fetched == {"m-Q8_0.gguf", "m-Q4_K_M.gguf"}
        with pytest.raises(ModelLoadError, match=r"tagged Q2_K.*m-Q8_0\.gguf"):
            fetch(hub.url, tmp_path / "b", "org/name:Q2_K")


@pytest.mark.parametrize(
    ("status", "match"),
    [(401, "hf auth login"), (403, "gated"), (404, "no repository org/name"), (503, "cannot fetch")],
)
def test_refusals_say_what_to_do(status: int, match: str, tmp_path: Path) -> None:
    with fake_hub(FOLDER) as hub:
        hub.status = status
        start = time.monotonic()
        with pytest.raises(DownloadError, match=match):
            fetch(hub.url, tmp_path)
    assert time.monotonic() - start < 60


def test_a_lone_gguf_is_taken_whatever_its_name() -> None:
    assert choose_gguf(["x/weights.gguf", "mmproj-x.gguf", "a.txt"], None, "o/n") == "x/weights.gguf"
    assert choose_gguf(["a-f16.gguf", "a-q4_k_m.gguf"], None, "o/n") == "a-q4_k_m.gguf"
    with pytest.raises(ModelLoadError, match="name one as o/n:TAG"):
        choose_gguf(["a.gguf", "b.gguf"], None, "o/n")


@pytest.mark.parametrize("model", ["org/name", "Qwen/Qwen2.5-0.5B", "a/b:Q8_0"])
def test_hub_ids_are_recognized(model: str) -> None:
    assert looks_like_hub_id(model)


@pytest.mark.parametrize("model", ["name", "/abs/path", "./rel/path", "a/b/c", "../x", "a b/c", "~/x", "a/"])
def test_paths_are_not_taken_for_hub_ids(model: str) -> None:
    assert not looks_like_hub_id(model)
