"""Prompts given as ids: what is no id of the vocabulary is refused, wherever it stands and however long the list is."""

from __future__ import annotations

import decimal
import enum
import sys
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.input import InputProcessor
from quire.errors import InvalidRequestError
from quire.sampling.params import SamplingParams

VOCAB = 199


class Three(enum.IntEnum):
    THREE = 3


@pytest.fixture(params=["with msgspec", "without"])
def inputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> InputProcessor:
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "msgspec", None)
    return InputProcessor(None, VOCAB, frozenset(), 0)


def ids_of(inputs: InputProcessor, prompt: Any) -> Any:
    return inputs.request("r", prompt, SamplingParams())[0].prompt_token_ids


def padded(token: Any, length: int) -> list[Any]:
    """A list with `token` near its end."""
    return [*(i % VOCAB for i in range(length)), token, 7]


@pytest.mark.parametrize("length", [0, 300])
@pytest.mark.parametrize(("token", "said"), [
    (True, "integers, not bool True"),
    (False, "integers, not bool False"),
    (3.0, "integers, not float 3.0"),
    (np.float32(3), "integers, not float32"),
    ("3", "integers, not str '3'"),
    (None, "integers, not NoneType None"),
    ([3], "integers, not list"),
    (decimal.Decimal(3), "integers, not Decimal"),
    (np.bool_(True), "integers, not bool"),
    (torch.tensor(3), "integers, not Tensor"),
    (-1, "token id -1 is outside the vocabulary (0 to 198)"),
    (VOCAB, "token id 199 is outside the vocabulary (0 to 198)"),
    (2**31, "token id 2147483648 is outside"),
    (2**70, "token id 1180591620717411303424 is outside"),
    (np.int64(-1), "token id -1 is outside"),
])
def test_what_is_no_id_is_refused(inputs: InputProcessor, token: Any, said: str, length: int) -> None:
    for prompt in (padded(token, length), tuple(padded(token, length)), {"prompt_token_ids": padded(token, length)}):
        with pytest.raises(InvalidRequestError) as found:
            ids_of(inputs, prompt)
        assert said in str(found.value) and found.value.field == "prompt"


@pytest.mark.parametrize("length", [0, 300])
@pytest.mark.parametrize("token", [0, 1, VOCAB - 1, np.int64(3), np.uint8(3), Three.THREE])
def test_ids_arrive_as_plain_ints_in_a_list_of_their_own(inputs: InputProcessor, token: Any, length: int) -> None:
    given = padded(token, length)
    found = ids_of(inputs, given)
    assert found == given and found is not given
    assert type(found) is list and {type(one) for one in found} == {int}


def test_the_lowest_of_two_wrong_ids_is_named(inputs: InputProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="token id -5 "):
        ids_of(inputs, [1, 900, -5, 3])


@pytest.mark.parametrize("prompt", [b"\x01\x02", bytearray(b"\x01"), {1, 2}, 5, None, np.arange(3)])
def test_what_is_no_sequence_is_refused(inputs: InputProcessor, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt is a string or a list of token ids"):
        ids_of(inputs, prompt)
