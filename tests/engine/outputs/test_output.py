"""Outputs: text, stop strings, reasons, log-probabilities and times, cumulative and as deltas."""

from __future__ import annotations

import random
import string
from dataclasses import replace

import pytest

from quire.engine.outputs.output import Logprob
from quire.engine.outputs.output_processor import OutputProcessor
from quire.errors import InvalidRequestError
from quire.sampling import SamplingParams
from quire.sampling.token_logprobs import TokenLogprobs
from quire.scheduler.request import FinishReason

EOS = 0
LETTERS = string.ascii_letters + string.digits + " .,!?\n"


class LetterTokenizer:
    """Each id from 1 on is one of LETTERS; 0 ends a text."""

    special_ids = frozenset([EOS])

    def token_text(self, token_id):
        return "<eos>" if token_id == EOS else LETTERS[token_id - 1]

    def token_bytes(self, token_id):
        return self.token_text(token_id).encode()

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.token_text(i) for i in ids if not (skip_special_tokens and i == EOS))

    def encode(self, text):
        return [LETTERS.index(char) + 1 for char in text]


TOKENIZER = LetterTokenizer()
ids = TOKENIZER.encode


def processor(tokenizer=TOKENIZER, **params) -> OutputProcessor:
    return OutputProcessor(
        "r1",
        SamplingParams(**{"max_tokens": 100, **params}),
        tokenizer,
        [5, 6],
        "de",
        seed=9,
        arrival_time=10.0,
    )


def test_text_grows_with_the_tokens_and_deltas_join_to_it():
    out = processor()
    deltas = [
        out.process(ids("Hel")).text_delta,
        out.process(ids("lo")).text_delta,
        out.process(ids("!"), finish_reason="length").text_delta,
    ]
    assert deltas == ["Hel", "lo", "!"]
    result = out.output()
    completion = result.outputs[0]
    assert (completion.text, completion.token_ids) == ("Hello!", ids("Hello!"))
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert result.finished and out.finished
    assert (result.request_id, result.prompt, result.prompt_token_ids, result.seed) == ("r1", "de", [5, 6], 9)


def test_outputs_carry_what_is_new_since_the_previous_one():
    out = processor()
    out.process(ids("ab"))
    out.process(ids("c"))
    first = out.output().outputs[0]
    out.process(ids("d"))
    second = out.output().outputs[0]
    assert (first.text_delta, first.token_ids_delta) == ("abc", ids("abc"))
    assert (second.text, second.text_delta, second.token_ids_delta) == ("abcd", "d", ids("d"))
    assert first.text == "abc" and first.token_ids == ids("abc")  # earlier outputs stay as they were


def test_an_eos_is_among_the_tokens_but_not_in_the_text():
    out = processor()
    out.process(ids("Hi"))
    update = out.process([EOS], finish_reason=FinishReason.STOP)
    assert (update.finish_reason, type(update.finish_reason), update.stop_reason) == ("stop", str, None)
    assert out.output().outputs[0].token_ids == [*ids("Hi"), EOS]
    assert out.output().outputs[0].text == "Hi"


def test_a_stop_token_is_in_the_text_only_when_asked_for():
    for include, text in [(False, "Hi"), (True, "Hi!")]:
        out = processor(stop_token_ids=ids("!"), include_stop_str_in_output=include)
        update = out.process(ids("Hi!"), finish_reason="stop", stop_reason=ids("!")[0])
        assert out.output().outputs[0].text == update.text_delta == text
        assert update.stop_reason == ids("!")[0]
        assert not update.hit_stop_string


def test_a_stop_string_across_tokens_ends_the_sequence_and_never_shows():
    out = processor(stop=["END", "xyz"])
    assert out.process(ids("aE")).text_delta == "a"
    assert out.process(ids("N")).text_delta == ""
    update = out.process(ids("D"))
    assert update.hit_stop_string and update.finished
    assert (update.text_delta, update.finish_reason, update.stop_reason) == ("", "stop", "END")
    completion = out.output().outputs[0]
    assert (completion.text, completion.token_ids) == ("a", ids("aEND"))


def test_text_that_only_looked_like_a_stop_string_comes_out():
    out = processor(stop="END")
    assert out.process(ids("aEN")).text_delta == "a"
    assert out.process(ids("x")).text_delta == "ENx"
    out.process(ids("EN"))
    assert out.process([EOS], finish_reason="stop").text_delta == "EN"
    assert out.output().outputs[0].text == "aENxEN"


def test_a_stop_string_can_be_kept_and_tokens_after_it_are_dropped():
    out = processor(stop="END", include_stop_str_in_output=True, logprobs=0)
    logprobs = [TokenLogprobs(token, -1.0, 1, [], []).pack() for token in ids("aENDbc")]
    update = out.process(ids("aENDbc"), logprobs, finish_reason="length")
    assert (update.text_delta, update.token_ids, update.finish_reason) == ("aEND", ids("aEND"), "stop")
    (whole,) = out.output().outputs
    assert len(whole.logprobs) == 4 and whole.cumulative_logprob == -4.0


def test_stop_strings_do_not_count_before_min_tokens():
    out = processor(stop="b", min_tokens=4)
    for token in ids("abab"):
        update = out.process([token])
    assert update.hit_stop_string
    assert out.output().outputs[0].text == "aba"


def test_a_finished_sequence_ignores_late_tokens():
    out = processor(stop="b")
    out.process(ids("ab"))
    late = out.process(ids("cd"), finish_reason="length")
    assert (late.text_delta, late.token_ids, late.hit_stop_string) == ("", [], False)
    assert out.output().outputs[0].token_ids == ids("ab")
    assert out.output().outputs[0].stop_reason == "b"


def test_an_aborted_request_keeps_what_it_had():
    out = processor(stop="END")
    out.process(ids("xEN"))
    [update] = out.abort("the step failed", now=12.0)
    assert update.finish_reason == "abort"
    result = out.output()
    assert (result.outputs[0].text, result.error, result.finished) == ("xEN", "the step failed", True)
    assert result.metrics.finished_time == 12.0
    assert out.abort() == []


def test_random_cuts_of_a_stream_give_the_same_text():
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice("abc") for _ in range(20))
        stops = ["".join(rng.choice("abc") for _ in range(rng.randint(2, 5))) for _ in range(2)]
        whole = processor(stop=stops)
        whole.process(ids(text), finish_reason="length")
        cut, rest = processor(stop=stops), ids(text)
        while rest and not cut.finished:
            size = rng.randint(1, 4)
            cut.process(rest[:size], finish_reason="length" if len(rest) <= size else None)
            rest = rest[size:]
        assert cut.output().outputs[0].text == whole.output().outputs[0].text
        assert cut.output().outputs[0].token_ids == whole.output().outputs[0].token_ids


def test_logprobs_name_the_token_then_the_likeliest_with_words_and_ranks():
    out = processor(logprobs=2)
    a, b, c = ids("abc")
    out.process(
        [a, b],
        [TokenLogprobs(a, -2.0, 3, [b, c], [-0.5, -1.0]).pack(),
         TokenLogprobs(b, -0.25, 1, [b, c], [-0.25, -3.0]).pack()],
    )
    completion = out.output().outputs[0]
    assert completion.logprobs == [
        {a: Logprob(-2.0, 3, "a"), b: Logprob(-0.5, 1, "b"), c: Logprob(-1.0, 2, "c")},
        {b: Logprob(-0.25, 1, "b"), c: Logprob(-3.0, 2, "c")},
    ]
    assert list(completion.logprobs[0]) == [a, b, c]
    assert completion.cumulative_logprob == -2.25


def test_no_logprobs_unless_asked_for():
    out = processor()
    out.process(ids("a"), [TokenLogprobs(1, -1.0, 1, [], []).pack()])
    assert out.output().outputs[0].logprobs is None
    assert out.output().outputs[0].cumulative_logprob is None


def test_prompt_logprobs_arrive_in_chunks_after_a_first_none():
    out = processor(prompt_logprobs=1)
    out.add_prompt_logprobs([TokenLogprobs(1, -1.0, 2, [2, 3], [-0.1, -5.0]).pack()])
    out.add_prompt_logprobs([TokenLogprobs(4, -1.5, 1, [4], [-1.5]).pack()])
    assert out.output().prompt_logprobs == [
        None,
        {1: Logprob(-1.0, 2, "a"), 2: Logprob(-0.1, 1, "b")},
        {4: Logprob(-1.5, 1, "d")},
    ]
    assert processor().output().prompt_logprobs is None


def test_without_detokenizing_there_are_tokens_but_no_text():
    for out in (processor(detokenize=False, logprobs=0), processor(tokenizer=None, logprobs=0)):
        out.process([1, 2], [TokenLogprobs(t, -1.0, 1, [], []).pack() for t in (1, 2)], finish_reason="length")
        completion = out.output().outputs[0]
        assert (completion.text, completion.token_ids) == ("", [1, 2])
        assert completion.logprobs[0][1].decoded_token is None


def test_stop_strings_without_a_tokenizer_are_refused_by_name():
    with pytest.raises(InvalidRequestError) as caught:
        processor(tokenizer=None, stop="x")
    assert caught.value.field == "stop"


def test_times_are_noted_once():
    out = processor()
    out.metrics.first_scheduled_time = 10.5
    assert out.metrics.queue_time == 0.5 and out.metrics.time_to_first_token is None
    out.process(ids("a"), now=11.0)
    out.process(ids("b"), now=12.0)
    out.process(ids("c"), finish_reason="length", now=13.0)
    out.process(ids("d"), now=14.0)
    metrics = out.output().metrics
    assert (metrics.first_token_time, metrics.finished_time) == (11.0, 13.0)
    assert (metrics.time_to_first_token, metrics.latency) == (1.0, 3.0)


def test_several_sequences_are_kept_apart_and_all_must_end():
    out = OutputProcessor("r", SamplingParams(n=2, stop="!"), TOKENIZER, [1])
    out.process(ids("a"), index=0)
    out.process(ids("b!"), index=1)
    assert not out.finished
    out.process(ids("c"), index=0, finish_reason="length")
    result = out.output()
    assert result.finished
    assert [(o.index, o.text, o.finish_reason) for o in result.outputs] == [
        (0, "ac", "length"),
        (1, "b", "stop"),
    ]


def test_an_unknown_finish_reason_is_a_mistake_of_the_engine():
    with pytest.raises(ValueError, match="finish_reason"):
        processor().process([], finish_reason="tired")


def test_an_output_keeps_what_there_was_when_it_was_made():
    out = processor(logprobs=0)
    said = [TokenLogprobs(1, -0.5, 1, [], []).pack()] * 3
    out.process(ids("abc"), said)
    first = out.output().outputs[0]
    out.process(ids("def"), said)
    second = out.output().outputs[0]
    assert (first.text, first.token_ids, len(first.logprobs)) == ("abc", ids("abc"), 3)
    assert (second.text, second.token_ids, len(second.logprobs)) == ("abcdef", ids("abcdef"), 6)
    assert first == replace(first)
    assert first != second
    first.token_ids.append(1)
    assert out.output().outputs[0].token_ids == ids("abcdef")


class CountedList(list):
    """Counts elements that are copied out of it."""

    copied = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        if isinstance(place, slice):
            CountedList.copied += len(found)
        return found

    def __iter__(self):
        CountedList.copied += len(self)
        return super().__iter__()


def test_who_reads_only_what_is_new_has_nothing_else_copied():
    out = processor()
    state = out._sequences[0]
    state.token_ids = CountedList()
    for _ in range(50):
        out.process(ids("ab"))
        assert out.output().outputs[0].token_ids_delta == ids("ab")
    assert CountedList.copied <= 4 * 50
    assert out.output().outputs[0].token_ids == ids("ab") * 50


def test_prompt_logprobs_are_shared_by_all_outputs_once_they_are_there():
    out = processor(prompt_logprobs=0)
    assert out.output().prompt_logprobs == [None]
    out.add_prompt_logprobs([TokenLogprobs(1, -0.5, 1, [], []).pack()])
    assert out.output().prompt_logprobs is out.output().prompt_logprobs
    assert len(out.output().prompt_logprobs) == 2


class CountingTokenizer(LetterTokenizer):
    decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += 1
        return super().decode(ids, skip_special_tokens)


def test_log_probabilities_are_described_when_they_are_read_and_once():
    counting, for_text = CountingTokenizer(), CountingTokenizer()
    out, whole, plain = processor(counting, logprobs=1), processor(logprobs=1), processor(for_text)
    records = [TokenLogprobs(token, -0.5, 2, [1], [-0.25]).pack() for token in ids("bcde")]
    whole.process(ids("bcde"), records)
    for token in ids("bcde"):
        plain.process_token(token, lambda: 11.0)
    for token, record in zip(ids("bcd"), records, strict=False):
        out.process_token(token, lambda: 11.0, record)
    early = out.output().outputs[0]
    out.process_token(ids("e")[0], lambda: 11.0, records[3])
    late = out.output().outputs[0]
    assert (early.num_logprobs, late.num_logprobs) == (3, 4)
    assert counting.decoded == for_text.decoded, "nobody has read them"
    assert early.logprobs == whole.output().outputs[0].logprobs[:3]
    words = counting.decoded
    assert late.logprobs == whole.output().outputs[0].logprobs and late.cumulative_logprob == -2.0
    assert late.logprobs[0] is early.logprobs[0] and counting.decoded - words == 2


def test_a_stop_string_found_by_single_tokens_keeps_the_log_probabilities_up_to_it():
    out = processor(logprobs=0, stop=["ND"])
    found = [out.process_token(token, lambda: 11.0, TokenLogprobs(token, -1.0, 1, [], []).pack())
             for token in ids("aNDb")]
    (whole,) = out.output().outputs
    assert found == [None, None, "ND", None] and whole.text == "a"
    assert [list(position) for position in whole.logprobs] == [[token] for token in ids("aND")]
    assert whole.cumulative_logprob == -3.0
