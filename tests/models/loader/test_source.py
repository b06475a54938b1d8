"""resolve_model: names, paths and formats to a source; what is wrong with a folder is said."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.errors import ConfigError, DownloadError, ModelLoadError
from quire.models.loader.source import FolderSource, GgufSource, ModelSource, Once, resolve_model
from tests.models.loader.tiny_gguf import tiny_model, write_gguf

TOKENIZER = {
    "version": "1.0",
    "model": {
        "type": "WordLevel",
        "vocab": {"<s>": 0, "</s>": 1, "hello": 2, "world": 3},
        "unk_token": "<s>",
    },
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "normalizer": None,
    "post_processor": None,
    "decoder": None,
}


def llama_folder(folder: Path, **save: Any) -> Path:
    tiny_model("llama").save_pretrained(folder, **save)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "20KB"}])
def test_a_folder_gives_the_weights_that_transformers_reads(save: dict[str, Any], tmp_path: Path) -> None:
    source = resolve_model(str(llama_folder(tmp_path, **save)))
    assert isinstance(source, FolderSource)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(save)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    weights = dict(source.weights())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert source.config["architectures"] == ["LlamaForCausalLM"]


def test_a_folder_gives_its_tokenizer_and_end_tokens(tmp_path: Path) -> None:
    llama_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.6}))
    source = resolve_model(str(tmp_path))
    assert source.tokenizer().encode("hello world") == [2, 3]
    assert source.eos_token_ids == (7, 9, 1)
    assert source.generation_config["temperature"] == 0.6


def test_a_config_alone_is_enough_for_dummy_weights(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve_model(str(tmp_path), load_format="dummy")
    assert source.is_dummy and source.config == config and source.eos_token_ids == (2,)
    with pytest.raises(ModelLoadError, match="dummy"):
        source.weights()
    with pytest.raises(ModelLoadError, match="skip_tokenizer_init"):
        source.tokenizer()


def test_a_gguf_file_is_known_by_its_content(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "renamed.model", "llama", tiny_model("llama"))
    source = resolve_model(str(path))
    assert isinstance(source, GgufSource) and source.name == "renamed.model"
    assert source.eos_token_ids == (1,) and source.generation_config["bos_token_id"] == 0
    assert source.tokenizer().vocab_size == 96


def test_a_folder_with_one_gguf_stands_for_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    assert isinstance(resolve_model(str(tmp_path)), GgufSource)
    (tmp_path / "n.gguf").write_bytes((tmp_path / "m.gguf").read_bytes())
    with pytest.raises(ModelLoadError, match=r"m\.gguf, n\.gguf"):
        resolve_model(str(tmp_path))


def test_another_tokenizer_may_be_named(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    folder = llama_folder(tmp_path / "hf")
    for place in (folder, folder / "tokenizer.json"):
        assert resolve_model(str(model), tokenizer=str(place)).tokenizer().encode("world") == [3]
    assert resolve_model(str(folder), tokenizer=str(model)).tokenizer().vocab_size == 96


def test_a_tokenizer_is_made_once_whoever_asks() -> None:
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def make() -> str:
        made.append(1)
        begun.set()
        assert go_on.wait(60)
        return "tokenizer"

    once = Once(make)
    once.start()
    assert begun.wait(60)
    asker = threading.Thread(target=once)
    asker.start()
    go_on.set()
    assert once() == "tokenizer" and once() == "tokenizer"
    asker.join(60)
    assert len(made) == 1


def test_a_tokenizer_that_cannot_be_made_in_a_thread_says_why_to_who_asks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    source = resolve_model(str(tmp_path), load_format="dummy")
    source.start_tokenizer()
    with pytest.raises(ModelLoadError, match="skip_tokenizer_init"):
        source.tokenizer()


def test_weights_can_be_had_in_half_precision(tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))))
    assert {tensor.dtype for _, tensor in source.weights(torch.bfloat16)} == {torch.bfloat16}


def test_leaving_the_weights_halfway_is_no_trouble(tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))))
    for name, _ in source.weights():
        assert name
        break
    assert len(list(source.weights())) == 21


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, r"config\.json is missing"),
        ("{", "cannot be read as JSON"),
        ("[1]", "should hold a JSON object"),
        ("{}", "architectures"),
        ('{"architectures": []}', "architectures"),
        ('{"architectures": [3]}', "architectures"),
        ("\udcff", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_wrong_config_is_named(text: str | None, match: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=match):
        resolve_model(str(tmp_path))


def test_weights_that_are_missing_are_found_before_loading(tmp_path: Path) -> None:
    llama_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("model", ["smolm2", "/no/such/folder", "./x/y/z.gguf", "a b/c", "x/y.gguf"])
def test_an_unknown_name_lists_what_is_known(model: str) -> None:
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        resolve_model(model)


@pytest.mark.parametrize(
    ("model", "load_format"), [("", "auto"), ("a\0b", "auto"), ("smollm2-135m", "pickle")]
)
def test_bad_arguments_are_config_errors(model: str, load_format: str) -> None:
    with pytest.raises(ConfigError):
        resolve_model(model, load_format=load_format)


def test_a_file_cannot_be_read_as_safetensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    with pytest.raises(ModelLoadError, match="needs a folder"):
        resolve_model(str(path), load_format="safetensors")


def test_an_unreachable_hub_fails_fast_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    from quire.models.loader.hub import fetch_from_hub

    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(DownloadError, match="hf download org/name --local-dir"):
            fetch_from_hub("org/name", cache_dir=tmp_path, endpoint=endpoint, progress=False)
    assert time.monotonic() - start < 30


def smollm2() -> ModelSource:
    try:
        return resolve_model("smollm2-135m", progress=False)
    except DownloadError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


def test_smollm2_is_read_as_the_gguf_package_reads_it() -> None:
    source = smollm2()
    assert isinstance(source, GgufSource)
    weights = dict(source.weights())
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    assert source.config["tie_word_embeddings"] is True and source.eos_token_ids == (2,)
    raw = np.memmap(source.path, np.uint8, "r")
    for name in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.29.attn_norm.weight"):
        tensor = source._file.tensors[name]
        stored = raw[tensor.offset : tensor.offset + tensor.nbytes]
        kind = gguf.GGMLQuantizationType[tensor.format.name]
        expected = gguf.quants.dequantize(np.array(stored), kind).reshape(tensor.shape)
        hf_name = {
            "token_embd.weight": "model.embed_tokens.weight",
            "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
            "blk.29.attn_norm.weight": "model.layers.29.input_layernorm.weight",
        }[name]
        assert np.array_equal(weights[hf_name].numpy(), expected)


PEAK = """
import torch
from quire.machine import peak_memory_bytes
from quire.models.loader.source import resolve_model
source = resolve_model("smollm2-135m", progress=False)
source.tokenizer()
before = peak_memory_bytes()
kept = {name: tensor for name, tensor in source.weights()}
print(peak_memory_bytes() >> 20, before >> 20)
"""


def test_loading_costs_little_more_than_the_weights() -> None:
    smollm2()
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=120, check=True
    )
    peak, before = map(int, done.stdout.split())
    assert 500 < peak - before < 538_060_032 / 2**20 + 60, (peak, before)
