"""Tokenizers built from GGUF metadata give the ids that llama.cpp and transformers give."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.errors import DownloadError, ModelLoadError, UnsupportedModelError
from quire.models.loader.catalog import CATALOG
from quire.models.loader.gguf import GgufFile
from quire.models.loader.pull import cached_file
from quire.models.loader.source import load_tokenizer, resolve_model
from quire.tokenizer import Tokenizer
from quire.tokenizer.from_gguf import tokenizer_from_gguf
from quire.tokenizer.pretokenize import rule_named
from tests.tokenizer.texts import TEXTS

WITH_PAIRS = [
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe",
    "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
]  # fmt: skip


@cache
def load(models: Path, name: str) -> Tokenizer:
    return load_tokenizer(models / f"ggml-vocab-{name}.gguf")


@cache
def smollm2() -> Tokenizer:
    try:
        return resolve_model("smollm2-135m", progress=False).tokenizer()
    except DownloadError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


def test_every_vocabulary_with_pairs_is_checked(llama_cpp_models: Path) -> None:
    names = {
        path.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp")
        for path in llama_cpp_models.glob("*.inp")
    }
    assert names == set(WITH_PAIRS)


@pytest.mark.parametrize("name", WITH_PAIRS)
def test_llama_cpps_pairs_hold(name: str, llama_cpp_models: Path) -> None:
    tokenizer = load(llama_cpp_models, name)
    base = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    inputs = Path(f"{base}.inp").read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    outputs = [[int(i) for i in line.split()] for line in Path(f"{base}.out").read_text().split("\n")]
    assert len(inputs) > 40
    wrong = [
        (text, ids) for text, ids in zip(inputs, outputs, strict=False)
        if tokenizer.encode(text, add_special_tokens=False) != ids
    ]  # fmt: skip
    assert not wrong


def metadata(models: Path, name: str) -> dict[str, Any]:
    with GgufFile(models / f"ggml-vocab-{name}.gguf") as file:
        return dict(file.metadata)


def oracle(models: Path, name: str) -> Any:
    """transformers' own tokenizer class over the same vocabulary and merges."""
    import transformers

    values = metadata(models, name)
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    kinds = {"gpt-2": transformers.GPT2Tokenizer, "qwen2": transformers.Qwen2Tokenizer}
    made = kinds[name](vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    types = values["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        {"additional_special_tokens": [t for t, k in zip(tokens, types, strict=True) if k == 3]}
    )
    return made


@pytest.mark.parametrize("name", ["gpt-2", "qwen2"])
def test_transformers_tokenizers_agree(name: str, llama_cpp_models: Path) -> None:
    ours, theirs = load(llama_cpp_models, name), oracle(llama_cpp_models, name)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


BYTE_LEVEL_EXACT = ["gpt-2", "llama-bpe", "starcoder", "falcon"]


@pytest.mark.parametrize("name", [*BYTE_LEVEL_EXACT, "llama-spm", "gemma-4"])
def test_text_comes_back_whole(name: str, llama_cpp_models: Path) -> None:
    tokenizer = load(llama_cpp_models, name)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(ids, skip_special_tokens=False)
        assert back == text, (text, back)


def test_token_bytes_join_to_the_decoded_text(llama_cpp_models: Path) -> None:
    for name in (*BYTE_LEVEL_EXACT, "gemma-4"):
        tokenizer = load(llama_cpp_models, name)
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8") == text, (name, text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=12))
def test_any_byte_level_ids_decode_as_their_bytes_do(ids: list[int]) -> None:
    tokenizer = smollm2()
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert tokenizer.decode(ids, skip_special_tokens=False) == joined.decode("utf-8", "replace")


SMOLLM2_LACKS = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back_from_smollm2(text: str) -> None:
    tokenizer = smollm2()
    # The vocabulary has no token for some rare bytes, which are lost here as in transformers.
    assume(not {*text.encode()} & SMOLLM2_LACKS)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_smollm2_has_its_special_tokens_and_template() -> None:
    tokenizer = smollm2()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 49152)
    assert tokenizer.encode("<|im_start|>") == [1] and {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.encode("Hello world") == [19556, 905]  # no BOS: the file says so
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_smollm2_cuts_text_as_its_own_tokenizer_json_does() -> None:
    """SmolLM2's tokenizer.json says Digits, then ByteLevel with the library's own expression."""
    from tokenizers import pre_tokenizers

    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = smollm2().backend.pre_tokenizer
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == own.pre_tokenize_str(text), text


def test_bos_is_added_once(llama_cpp_models: Path) -> None:
    tokenizer = load(llama_cpp_models, "llama-spm")
    assert tokenizer.encode("Hello") == [1, 15043]
    assert tokenizer.encode("<s>Hello") == [1, 15043]
    assert tokenizer.encode("<s>Hello", add_special_tokens=False) == [1, 15043]
    assert tokenizer.encode("Hello", add_special_tokens=False) == [15043]
    llama3 = load(llama_cpp_models, "llama-bpe")
    assert llama3.encode("Hi")[0] == llama3.bos_token_id == 128000


def test_named_chat_templates_are_all_read(llama_cpp_models: Path) -> None:
    tokenizer = load(llama_cpp_models, "command-r")
    messages = [{"role": "user", "content": "Hi"}]
    plain = tokenizer.apply_chat_template(messages)
    tool = {"name": "f", "description": "d", "parameter_definitions": {}}
    assert tokenizer.apply_chat_template(messages, tools=[tool]) != plain
    assert tokenizer.apply_chat_template(messages, chat_template="rag", documents=[]) != plain


def test_the_end_of_a_turn_ends_an_answer(llama_cpp_models: Path) -> None:
    assert load(llama_cpp_models, "qwen2").eos_token_ids == (151643, 151645)
    assert load(llama_cpp_models, "phi-3").eos_token_ids == (32000, 32007)


def test_gemma3_tokenizes_as_its_newer_vocabulary_does(llama_cpp_models: Path) -> None:
    """Gemma 3's file has scores and no merges, Gemma 4's has merges; most tokens are the same."""
    path = cached_file(CATALOG["gemma3-270m"])
    if path is None:
        pytest.skip("gemma3-270m is not in the cache: `quire pull gemma3-270m` fetches it")
    ours, other = load_tokenizer(path), load(llama_cpp_models, "gemma-4")
    for text in ["Hello world, how are you?", "The quick brown fox", "Привет мир", "x = [1, 2]"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert [ours.token_text(i) for i in ids] == other.backend.encode(
            text, add_special_tokens=False
        ).tokens
    assert ours.encode("Hi")[0] == 2 and ours.decode(ours.encode("Hi there")) == "Hi there"


def test_a_llama_vocabulary_round_trips_bytes_it_has_no_piece_for(llama_cpp_models: Path) -> None:
    tokenizer = load(llama_cpp_models, "llama-spm")
    ids = tokenizer.encode("\u0e99\U00010348", add_special_tokens=False)
    assert tokenizer.token_bytes(ids[-1]) == "\U00010348".encode()[-1:]
    assert tokenizer.decode(ids) == "\u0e99\U00010348"


def small(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": np.array([3, 1, 1, 1]),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    values.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return values


def test_kimi_k2_keeps_chinese_by_itself() -> None:
    text = " 读书ab读 I'VE 12345/\n"
    cut = rule_named("kimi-k2").build(byte_level=True).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == [" ", "读书", "ab", "读", " I'VE", " ", "123", "45", "/\n"]


def test_a_small_vocabulary_merges() -> None:
    assert tokenizer_from_gguf(small()).encode("ab<s>a") == [3, 0, 1]
    assert tokenizer_from_gguf(small(add_bos_token=True)).encode("ab") == [0, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": []},
        {"tokens": 7},
        {"merges": None},
        {"token_type": np.array([1, 2])},
        {"token_type": "control"},
        {"bos_token_id": 4},
        {"bos_token_id": -1},
        {"bos_token_id": "<s>"},
        {"pre": 3},
    ],
)
def test_a_broken_vocabulary_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer"):
        tokenizer_from_gguf(small(**changes))


def test_merges_without_a_token_and_twice_the_same_token_do_no_harm() -> None:
    tokenizer = tokenizer_from_gguf(
        small(merges=["a b", "x y", "a", "", "b a"], tokens=["<s>", "a", "a", "ab"])
    )
    assert tokenizer.encode("a") == [1]
    assert tokenizer.vocab_size == 4


@pytest.mark.parametrize(("key", "value"), [("model", "t5"), ("model", ""), ("pre", "invented-rule")])
def test_an_unknown_kind_is_refused_with_the_way_out(key: str, value: str) -> None:
    with pytest.raises(UnsupportedModelError, match="tokenizer="):
        tokenizer_from_gguf(small(**{key: value}))
