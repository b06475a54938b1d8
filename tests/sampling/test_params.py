"""Sampling parameters: what is normalised, what is refused, and that the refusal names the field."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from quire.errors import InvalidRequestError
from quire.sampling import BeamSearchParams, SamplingParams
from quire.sampling.params import MAX_LOGPROBS

NAN, INF = float("nan"), float("inf")

WRONG = [
    ("n", 0),
    ("n", 65),
    ("n", True),
    ("n", 1.0),
    ("n", "1"),
    ("n", None),
    ("best_of", 0),
    ("best_of", "2"),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("temperature", 10**400),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_p", NAN),
    ("top_p", [0.5]),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", False),
    ("top_k", 1 << 40),
    ("min_p", -0.01),
    ("min_p", 1.1),
    ("min_p", NAN),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", INF),
    ("presence_penalty", 2.1),
    ("presence_penalty", NAN),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "x"),
    ("seed", -1),
    ("seed", 1 << 64),
    ("seed", 1.5),
    ("seed", True),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop", ["x"] * 65),
    ("stop", "x" * 1025),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", 3),
    ("stop_token_ids", [True]),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("logprobs", True),
    ("prompt_logprobs", 21),
    ("logit_bias", {1: NAN}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {"1": 1}),
    ("logit_bias", [1]),
    ("bad_words", [""]),
    ("bad_words", [7]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-3]),
    ("allowed_token_ids", "12"),
    ("skip_special_tokens", 0),
    ("detokenize", None),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda v: repr(v)[:30])
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"stop": ["x"], "detokenize": False}, "stop"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, named):
    with pytest.raises(InvalidRequestError, match=named) as caught:
        SamplingParams(**fields)
    assert caught.value.field == named


def test_an_unknown_keyword_raises():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_values_at_the_bounds_are_accepted():
    SamplingParams(
        n=64,
        best_of=64,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1,
        repetition_penalty=100,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=(1 << 64) - 1,
        max_tokens=None,
        min_tokens=100,
        stop=["x"] * 64,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=0,
        logit_bias={0: -100},
    )


def test_values_are_normalised():
    params = SamplingParams(top_k=-1, stop="END", stop_token_ids=[3, 3, 1], temperature=1, logit_bias={2: 1})
    assert params.top_k == 0
    assert params.stop == params.stop_strings == ("END",)
    assert params.stop_token_ids == (3, 1)
    assert isinstance(params.temperature, float) and params.logit_bias == {2: 1.0}
    assert SamplingParams().stop == () and SamplingParams().max_tokens == 16


def test_parameters_cannot_be_changed_behind_the_checks():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = -1.0


def test_the_callers_containers_are_copied():
    bias, stops = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[1], stops[0] = NAN, ""
    assert params.logit_bias == {1: 2.0} and params.stop == ("a",)


def test_tiny_temperatures_are_greedy():
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused_by_field(field):
    params = SamplingParams(**{field: {100: 1.0} if field == "logit_bias" else [100]})
    params.validate_for_vocab(101)
    with pytest.raises(InvalidRequestError, match=f"{field}.*100.*99") as caught:
        params.validate_for_vocab(100)
    assert caught.value.field == field


def test_plain_data_goes_there_and_back():
    params = SamplingParams(
        n=2,
        stop=["a", "b"],
        stop_token_ids=[4],
        logit_bias={7: -1.5},
        seed=5,
        bad_words=["no"],
        allowed_token_ids=[1, 2],
    )
    data = params.to_dict()
    assert SamplingParams.from_dict(data) == params
    assert json.loads(json.dumps(data))["stop"] == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="colour"):
        SamplingParams.from_dict({**data, "colour": 1})
    beam = BeamSearchParams(beam_width=4, max_tokens=9, length_penalty=0.5, early_stopping=True)
    assert BeamSearchParams.from_dict(beam.to_dict()) == beam


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 65),
        ("beam_width", True),
        ("max_tokens", 0),
        ("length_penalty", NAN),
        ("early_stopping", "always"),
        ("ignore_eos", 1),
        ("temperature", -1),
    ],
)
def test_beam_parameters_are_refused_by_name_too(field, value):
    with pytest.raises(InvalidRequestError, match=field) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, field: value})
    assert caught.value.field == field


def test_parameters_come_without_torch():
    code = "import sys, quire.sampling, quire.sampling.philox; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
