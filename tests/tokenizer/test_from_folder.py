"""Tokenizers of Hugging Face folders: the ids and texts that transformers' AutoTokenizer gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.errors import ModelLoadError
from quire.models.loader.source import load_tokenizer
from quire.tokenizer.from_folder import tokenizer_from_folder
from tests.tokenizer.texts import TEXTS

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo 世界 🎉"}]


@pytest.fixture(scope="module", params=["gpt-2", "llama-spm", "phi-3"])
def folder(
    request: pytest.FixtureRequest, llama_cpp_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder as transformers writes it, with one of the sdist's vocabularies in it."""
    source = load_tokenizer(llama_cpp_models / f"ggml-vocab-{request.param}.gguf")
    path = tmp_path_factory.mktemp(request.param)
    source.backend.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **source.special_tokens}
    config["chat_template"] = source.chat_template
    config["clean_up_tokenization_spaces"] = False
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_ids_and_texts_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = tokenizer_from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert (
            ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        )
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


def test_chats_render_as_in_transformers(folder: Path) -> None:
    ours, theirs = tokenizer_from_folder(folder), AutoTokenizer.from_pretrained(folder)
    if ours.chat_template is None:
        pytest.skip("this vocabulary has no chat template")
    rendered = ours.apply_chat_template(MESSAGES)
    assert rendered == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ours.encode(rendered, add_special_tokens=False) == ids


def word_level(folder: Path, **config: Any) -> Path:
    tokenizer = {
        "version": "1.0",
        "model": {
            "type": "WordLevel",
            "vocab": {"<s>": 0, "</s>": 1, "hi": 2, "<unk>": 3},
            "unk_token": "<unk>",
        },
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_special_tokens_come_from_the_config(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(word_level(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))
    assert tokenizer.special_ids == {0, 1} and tokenizer.decode([0, 2, 1]) == "hi"


def test_saved_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    assert tokenizer_from_folder(word_level(tmp_path)).encode("hi hi hi hi") == [2, 2, 2, 2]


def test_add_bos_token_is_honoured(tmp_path: Path) -> None:
    folder = word_level(tmp_path, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    assert tokenizer_from_folder(folder).encode("hi") == [0, 2]


def test_tokens_that_only_the_config_adds_get_their_ids(tmp_path: Path) -> None:
    added = {
        "4": {"content": "<tool>", "special": True, "normalized": False},
        "5": {"content": "<x>", "special": False},
    }
    tokenizer = tokenizer_from_folder(word_level(tmp_path, added_tokens_decoder=added))
    assert tokenizer.encode("hi<tool><x>") == [2, 4, 5] and tokenizer.vocab_size == 6
    assert tokenizer.special_ids == {4}


def test_contradicting_ids_are_refused(tmp_path: Path) -> None:
    added = {"9": {"content": "hi", "special": True}}
    with pytest.raises(ModelLoadError, match="'hi'"):
        tokenizer_from_folder(word_level(tmp_path, added_tokens_decoder=added))


def test_chat_templates_are_found_wherever_they_are(tmp_path: Path) -> None:
    folder = word_level(tmp_path, chat_template="inline")
    assert tokenizer_from_folder(folder).chat_template == "inline"
    (folder / "chat_template.jinja").write_text("own file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools|length }}")
    tokenizer = tokenizer_from_folder(folder)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "own file"
    assert tokenizer.apply_chat_template(messages, tools=[{}, {}]) == "tools 2"
    named = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    listed = tokenizer_from_folder(word_level(tmp_path / "listed", chat_template=named))
    assert listed.apply_chat_template(messages, chat_template="rag") == "r"


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("tokenizer.json", "{", "cannot be read as a tokenizer"),
        ("tokenizer.json", '{"model": {}}', "cannot be read as a tokenizer"),
        ("tokenizer.json", "\udcff", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "[", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("special_tokens_map.json", "3", "JSON object"),
        ("chat_template.json", "nope", "cannot be read as JSON"),
    ],
)
def test_broken_files_are_named(file: str, text: str, match: str, tmp_path: Path) -> None:
    folder = word_level(tmp_path)
    (folder / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=match):
        tokenizer_from_folder(folder)


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model alone.*skip_tokenizer_init"):
        tokenizer_from_folder(tmp_path)
