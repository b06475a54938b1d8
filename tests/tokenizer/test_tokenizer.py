"""The Tokenizer's own promises: bad input, missing templates, no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from quire.errors import ChatTemplateError, InvalidRequestError
from quire.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def make(**options: Any) -> Tokenizer:
    backend = Backend(WordLevel({"<unk>": 0, "hi": 1, "you": 7}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    return Tokenizer(backend, **options)


@pytest.mark.parametrize("prompt", [None, 3, ["a"], b"bytes"])
def test_a_prompt_that_is_no_text_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be text"):
        make().encode(prompt)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        make().encode("half \ud83c")


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [None]])
def test_ids_that_cannot_be_are_refused(ids: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="token ids"):
        make().decode(ids)


def test_ids_without_a_token_decode_to_nothing() -> None:
    tokenizer = make()
    assert tokenizer.decode([1, 5, 99999, 1]) == "hi hi"
    assert (tokenizer.token_text(99999), tokenizer.token_bytes(99999)) == ("", b"")


def test_the_vocabulary_reaches_to_the_largest_id() -> None:
    assert make().vocab_size == 8


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        make().apply_chat_template(USER)


def test_a_template_may_come_with_the_request() -> None:
    assert make(chat_template="own").apply_chat_template(USER, chat_template="{{ x }}", x=3) == "3"


def test_templates_of_requests_do_not_pile_up() -> None:
    tokenizer = make()
    for i in range(100):
        tokenizer.apply_chat_template(USER, chat_template=f"{{{{ {i} }}}}")
    assert len(tokenizer._compiled) <= 16


def test_the_room_imports_no_torch() -> None:
    code = (
        "import sys, quire.tokenizer.tokenizer, quire.tokenizer.from_gguf, quire.tokenizer.from_folder\n"
        "import quire.tokenizer.chat_template\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
