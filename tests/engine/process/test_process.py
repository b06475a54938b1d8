"""The engine's side of the conversation: messages in, one message per step out, and nothing in them can stop it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgspec
import pytest
import zmq

from quire.bench.scheduling.growth import counted
from quire.config import EngineConfig
from quire.engine.assembly.engine import build_engine
from quire.engine.core import EngineCore
from quire.engine.process import messages as m
from quire.engine.process.main import EngineServer, serve
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.sampling.token_logprobs import unpack_all
from tests.async_engines import greedy


class Mailbox:
    """Both sockets of a server and its pulse, without any: what is put in, what came out."""

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.sent: list[Any] = []
        self.state = ("", 0.0, 0)

    def recv(self, flags: int = 0) -> bytes:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def poll(self, timeout: int) -> int:
        assert self.inbox, "the engine would wait for ever"
        return 1

    def send(self, data: bytes) -> None:
        self.sent.append(m.decode_from_engine(data))

    def take(self, kind: type) -> list[Any]:
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return found


class Bench:
    """A server that is driven by hand."""

    def __init__(self, **options: Any) -> None:
        config = EngineConfig.create(model="smollm2-135m", executor="dummy", num_kv_blocks=64, **options)
        self.engine = build_engine(config, progress=False, clock=time.monotonic)
        self.mail = Mailbox()
        self.server = EngineServer(self.engine, self.mail, self.mail, self.mail)  # type: ignore[arg-type]

    def say(self, *messages: Any) -> None:
        self.mail.inbox.extend(each if isinstance(each, bytes) else m.encode(each) for each in messages)

    def add(self, handle: int, params: SamplingParams, prompt: list[int] | None = None, **more: Any) -> None:
        body = m.RequestBody(f"r{handle}", prompt or [1, 2, 3], params, handle, time.monotonic(), **more)
        self.say(m.add(handle, body))

    def turn(self) -> None:
        """Once around the loop of `EngineServer.run`."""
        server = self.server
        server._take_in()
        if server._core.has_work:
            server._step()
        elif server._news_due:
            server._send([], None)

    def rest(self) -> list[m.StepOutputs]:
        """Until there is nothing to do."""
        while self.mail.inbox or self.server._core.has_work or self.server._news_due:
            self.turn()
        self.server._scheduler.check()
        return self.mail.take(m.StepOutputs)

    @property
    def used(self) -> int:
        return sum(pool.num_used for pool in self.server._scheduler.cache.pools)


@pytest.fixture
def bench(smollm2: str) -> Bench:
    return Bench()


def test_all_that_a_step_brought_is_one_message(bench: Bench) -> None:
    for handle in range(1, 11):
        bench.add(handle, greedy(4))
    steps = bench.rest()
    assert len(steps) == 4
    assert [sorted(step.handles) for step in steps] == [list(range(1, 11))] * 3 + [[]]
    assert len(steps[0].started) == 10 and len(steps[3].news) == 10
    assert all(news.finish_reason == "length" for news in steps[3].news)
    assert [step.unfinished for step in steps] == [10, 10, 10, 0] and steps[3].metrics["requests_finished"] == 10
    assert [step.stats.output_tokens for step in steps] == [10] * 4


@pytest.mark.parametrize("data", [
    b"", b"\xc1", b"\x00" * 50, m.encode(["add"]), m.encode(["add", "x", {}]), m.encode({"add": 1}),
    m.encode(["nonsense", 1]), m.encode(m.Start({})), m.encode(["abort", ["a"]]), m.encode(["finish", 1, "a", 2]),
    m.encode(m.Abort([7, -1, 2**63])), m.encode(m.Finish(99, 0, "x")), m.encode(m.Finish(1, 5, "x")),
    m.encode(m.Finish(1, -1, "x")),
])
def test_a_malformed_message_harms_nobody(bench: Bench, data: bytes) -> None:
    bench.add(1, greedy(5))
    bench.turn()
    bench.say(data)
    steps = bench.rest()
    assert steps[-1].news[-1].finish_reason == "length" and steps[-1].unfinished == 0


@pytest.mark.parametrize(("changes", "says"), [
    ({"prompt_token_ids": "text"}, "could not be read"),
    ({"prompt_token_ids": [-1]}, "outside the vocabulary"),
    ({"prompt_token_ids": [10**6]}, "outside the vocabulary"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    ({"prompt_token_ids": [1] * 2000}, "the prompt has 2000 tokens"),
    ({"params": {"temperature": -1.0}}, "temperature must be at least 0"),
    ({"params": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
    ({"beams": {"beam_width": 0, "max_tokens": 1}}, "beam_width"),
    ({"cache_key": 5}, "could not be read"),
    ({"no_such_field": 5}, "could not be read"),
    ({"request_id": "r1"}, "is in use"),
])
def test_a_request_that_cannot_be_is_refused_alone(bench: Bench, changes: dict[str, Any], says: str) -> None:
    bench.add(1, greedy(5))
    body = {"request_id": "bad", "prompt_token_ids": [1], "params": {}, "seed": 1, "arrival_time": 0.0, **changes}
    bench.say(m.Add(2, msgspec.Raw(m.encode(body))))
    steps = bench.rest()
    (refused,) = bench.mail.take(m.Refused)
    assert refused.handle == 2 and says in refused.message and refused.invalid
    assert steps[-1].unfinished == 0 and steps[-1].metrics["requests_finished"] == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_aborted_requests_blocks_are_free_within_two_steps(smollm2: str, depth: int) -> None:
    bench = Bench(max_steps_in_flight=depth)
    for handle in range(1, 5):
        bench.add(handle, greedy(500), prompt=[handle] * 100)
    for _ in range(5):
        bench.turn()
    bench.say(m.Abort([1, 2, 3, 4]))
    steps = bench.server._scheduler.stats.steps
    while bench.used:
        bench.turn()
    assert bench.server._scheduler.stats.steps - steps <= 2
    bench.rest()


def test_an_aborted_requests_blocks_are_free_before_the_next_step(bench: Bench) -> None:
    bench.add(1, greedy(500), prompt=[1] * 100)
    bench.add(2, greedy(500), prompt=[2] * 100)
    bench.turn()
    held = bench.used
    bench.say(m.Abort([1]))
    bench.turn()
    assert bench.used <= held - 6
    bench.say(m.Abort([2]))
    bench.turn()
    assert bench.used == 0
    assert bench.rest() or not bench.server._requests
    assert bench.server._scheduler.stats.requests_aborted == 2


def test_an_aborted_request_is_never_heard_of_again(bench: Bench) -> None:
    bench.add(1, greedy(50))
    bench.turn()
    bench.mail.sent.clear()
    bench.say(m.Abort([1]))
    for step in bench.rest():
        assert not step.handles and not step.news and step.unfinished == 0


def test_an_id_may_come_again_as_soon_as_its_request_is_aborted(bench: Bench) -> None:
    bench.add(1, greedy(50))
    bench.turn()
    body = m.RequestBody("r1", [1], greedy(2), 1, 0.0)
    bench.say(m.Abort([1]), m.add(2, body))
    assert bench.rest()[-1].news[0].handle == 2
    assert not bench.mail.take(m.Refused)


def test_log_probabilities_of_single_tokens_are_a_list_beside_them(bench: Bench) -> None:
    bench.add(1, greedy(4, logprobs=2))
    bench.add(2, greedy(4))
    steps = bench.rest()
    told = {1: [], 2: []}
    for step in steps:
        for handle, record in zip(step.handles, step.logprobs or [b""] * len(step.handles), strict=True):
            told[handle].append(record)
    assert all(told[1]) and not any(told[2]) and len(told[1]) == len(told[2]) == 3
    assert [len(one.top_ids) for one in unpack_all(told[1])] == [2, 2, 2]
    bench.add(3, greedy(4))
    assert [step.logprobs for step in bench.rest() if step.handles] == [[]] * 3


def test_a_stop_string_found_outside_finishes_one_sequence(bench: Bench) -> None:
    bench.add(1, greedy(30, n=2))
    bench.turn()
    bench.mail.sent.clear()
    bench.say(m.Finish(1, 0, "END"))
    bench.turn()
    (step,) = bench.mail.take(m.StepOutputs)
    assert [news.index for news in step.news] == [1] and step.unfinished == 1
    bench.say(m.Finish(1, 1, "END"))
    last = bench.rest()[-1]
    assert last.unfinished == 0 and last.metrics["requests_finished"] == 1 and bench.used == 0


def test_beams_come_with_their_scores(bench: Bench) -> None:
    bench.add(1, greedy(4), beams=BeamSearchParams(beam_width=3, max_tokens=4))
    news = bench.rest()[-1].news
    assert len(news) == 3 and all(each.score is not None and each.finish_reason for each in news)


def test_questions_are_answered_between_steps(bench: Bench) -> None:
    bench.add(1, greedy(20))
    bench.turn()
    bench.say(m.Call(5, "metrics"), m.Call(6, "check"), m.Call(7, "clear_prefix_cache"), m.Call(8, "__class__"))
    bench.turn()
    answers = {answer.number: answer for answer in bench.mail.take(m.Answer)}
    assert answers[5].value["requests_running"] == 1 and answers[6] == m.Answer(6) and answers[7].value == 0
    assert answers[8].error == "there is no call '__class__'"


def test_an_engine_that_breaks_says_what_broke_and_ends(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.process.main.Doorbell", lambda *_: None)  # there is no real inbox to wait at
    mail = Mailbox()
    mail.inbox.append(m.encode(m.Start({"model": smollm2, "executor": "dummy", "num_kv_blocks": 64})))
    mail.inbox.append(m.encode(m.add(1, m.RequestBody("r", [1], greedy(5), 1, 0.0))))
    monkeypatch.setattr(EngineCore, "step", lambda self, wait_for_kv: 1 // 0)
    assert serve(mail, mail, mail) == 1  # type: ignore[arg-type]
    ready, failed = mail.sent
    assert isinstance(ready, m.Ready) and ready.model_name == smollm2 and ready.num_kv_blocks == 64
    assert isinstance(failed, m.Failed) and failed.kind == "EngineError" and "ZeroDivisionError" in failed.message


def test_an_engine_that_cannot_be_built_says_so_as_what_it_was() -> None:
    mail = Mailbox()
    mail.inbox.append(m.encode(m.Start({"model": "no-such-model"})))
    assert serve(mail, mail, mail) == 1  # type: ignore[arg-type]
    assert mail.sent[0].kind == "ModelLoadError"


def test_an_engine_told_to_stop_stops(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.process.main.Doorbell", lambda *_: None)  # there is no real inbox to wait at
    mail = Mailbox()
    mail.inbox.append(m.encode(m.Start({"model": smollm2, "executor": "dummy", "num_kv_blocks": 64})))
    mail.inbox.append(m.encode(m.Shutdown()))
    assert serve(mail, mail, mail) == 0  # type: ignore[arg-type]


def test_messages_survive_the_wire() -> None:
    params = SamplingParams(stop=["a", "b"], logit_bias={5: 1.5}, seed=2**64 - 1, max_tokens=None, top_k=3,
                            allowed_token_ids=[1, 5], bad_words=["x"], temperature=0.3)
    beams = BeamSearchParams(beam_width=2, max_tokens=3, early_stopping="never")
    body = m.RequestBody("é", [0, 2**31], params, 2**64 - 1, 1.5, beams, [[1], [2, 3]], -4, b"\x00\xff", "t")
    message = m.decode_to_engine(m.encode(m.add(2**40, body)))
    assert isinstance(message, m.Add) and message.handle == 2**40 and m.decode_body(message.body) == body


def test_news_of_the_last_token_goes_out_before_the_engine_examines_itself(bench: Bench) -> None:
    order: list[str] = []
    scheduler, send = bench.server._scheduler, bench.mail.send
    original = scheduler.examination

    def examination() -> Any:
        order.append("examined")
        yield from original()

    def sent(data: bytes) -> None:
        order.append("sent")
        send(data)

    def nothing(timeout: int) -> int:
        if timeout:
            raise TimeoutError("the engine waits")
        return 0

    scheduler.examination = examination  # type: ignore[method-assign]
    bench.mail.send = sent  # type: ignore[method-assign]
    bench.add(1, greedy(2))
    while bench.mail.inbox or bench.server._core.has_work:
        bench.turn()
    bench.mail.poll = nothing  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        bench.server._take_in()
    assert order[-1] == "examined" and set(order[:-1]) == {"sent"}


def test_telling_who_has_started_costs_nothing_for_those_who_wait() -> None:
    def operations(waiting: int) -> int:
        bench = Bench(max_num_seqs=1)
        for handle in range(1, 3 + waiting):
            bench.add(handle, greedy(4))
        bench.server._take_in()
        bench.server._step()
        started = bench.mail.take(m.StepOutputs)[-1].started
        assert [each.handle for each in started] == [1]
        with counted() as count:
            assert bench.server._newly_started() == []
        return count.operations

    assert operations(50) == operations(2)
