"""Draft heads over the device worker on CPU tensors: the drafts of the plain reference, the tokens without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.assembly import engine as assembly
from quire.errors import ConfigError
from quire.executor.device import DeviceExecutor
from quire.ops.cpu import CpuOps
from quire.scheduler.plan import PlanEntry
from quire.worker.gpu.heads import HeadRunner
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.speculation import speculation_of
from quire.worker.gpu.worker import GpuWorker
from tests import test_eagle, test_mtp
from tests.eagle_heads import PlainHead, target_states
from tests.test_eagle import PROMPTS, eagle
from tests.test_speculation import params
from tests.worker.gpu.head_cases import Pause

target = test_eagle.target
plain = test_eagle.plain
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)


def build(source: Any, config: Any, *_: Any) -> tuple[GpuWorker, DeviceExecutor]:
    """In the place of `build_worker`: what it does for a GPU, on CPU tensors."""
    seqs, asked = config.scheduler.max_num_seqs or 8, config.speculation.options
    options = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=seqs,
                            max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 512,
                            max_model_len=config.model.max_model_len,
                            draft_rows=0 if asked is None else asked.most_drafts * seqs)
    worker = GpuWorker(source.config, source.weights(None), config.cache, options, ops=CpuOps(num_threads=1),
                       speculation=speculation_of(config, source))
    return worker, DeviceExecutor(worker)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "build_worker", build)


def drafts_of(llm: LLM) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Fills up while the engine runs: what was proposed after each text."""
    worker = llm._core.executor._worker  # type: ignore[attr-defined]
    drafter, table = worker._runner.drafter, worker.table
    propose, seen = drafter.propose, {}

    def recording(entries: Sequence[PlanEntry], rows: Any) -> Any:
        filled, drafted = propose(entries, rows)
        for entry, tokens in zip(entries, drafted.by_entry(), strict=True):
            if tokens and table.info(entry.row).params.greedy:
                text = tuple(table.tokens[entry.row, : entry.start + 1].tolist())
                assert seen.setdefault(text, tokens) == tokens, "two proposals for one text differ"
        return filled, drafted

    drafter.propose = recording
    return seen


def told(folder: Path, **options: Any) -> tuple[list[Any], dict[str, Any], HeadRunner]:
    """Tokens and log-probabilities of requests of all kinds, and who drafted."""
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, **options) as llm:
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        llm.check()
        runner = llm._core.executor._worker._runner.drafter.runner  # type: ignore[attr-defined]
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs], llm.metrics(), runner


@pytest.mark.parametrize(("kind", "options"), [
    ("eagle", {"max_steps_in_flight": 2}),
    ("eagle3", {"max_steps_in_flight": 2}),
    ("eagle", {"max_num_batched_tokens": 7}),
    ("eagle3", {"block_size": 4, "num_kv_blocks": 28, "swap_space": 0.01, "preemption_mode": "swap"}),
    ("eagle", {"k": 1, "block_size": 1, "num_kv_blocks": 110, "max_steps_in_flight": 3}),
], ids=["eagle", "eagle3", "chunks", "swap", "one draft"])
def test_tokens_and_logprobs_are_those_without_drafts(target: Path, plain: Any, on_device: None, kind: str,
                                                      options: dict[str, Any]) -> None:
    options = dict(options)
    found, metrics, _ = told(target, **eagle(target / kind, options.pop("k", 4)), **options)
    assert found == [(tokens, logprobs) for tokens, logprobs, _ in plain[1]]
    assert metrics["spec_draft_tokens"] > metrics["spec_accepted_tokens"] > (8 if kind == "eagle" else 0)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_rejection_draws_what_it_draws_on_a_cpu(target: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    asked = {**eagle(target / kind, verifier="rejection"), "max_steps_in_flight": 1}
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, **asked) as llm:
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        want, counted = [o.outputs[0].token_ids for o in outputs], llm.metrics()
    monkeypatch.setattr(assembly, "build_worker", build)
    found, metrics, _ = told(target, **asked)
    assert [tokens for tokens, _ in found] == want
    for name in ("spec_draft_tokens", "spec_accepted_tokens"):
        assert metrics[name] == counted[name] > 0


@pytest.mark.parametrize("options", [
    {"block_size": 8, "max_steps_in_flight": 2},
    {"block_size": 4, "num_kv_blocks": 40, "swap_space": 0.01, "preemption_mode": "swap", "max_num_batched_tokens": 9},
], ids=["default", "swap-and-chunks"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_drafts_are_those_of_the_reference(target: Path, on_device: None, kind: str, options: dict[str, Any]) -> None:
    """Whatever was cached, cut into chunks, shared, preempted or swapped: a draft depends on the text alone."""
    prompts = [prompt[:30] for prompt in PROMPTS]
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, **options, **eagle(target / kind)) as llm:
        seen = drafts_of(llm)
        texts = [p + list(o.outputs[0].token_ids) for p, o in
                 zip(prompts, llm.generate(prompts, [GREEDY] * len(prompts), use_tqdm=False), strict=True)]
        # The second time the prompts, and what was said after them, come from the cache.
        again = [text[:-9] for text in texts]
        llm.generate(again, [GREEDY] * len(again), use_tqdm=False)
        llm.check()
    torch.set_num_threads(1)
    head = PlainHead(target / kind, target)
    features = [head.features(target_states(target, text)) for text in texts]
    checked = 0
    for text, drafts in seen.items():
        whole = next(i for i, each in enumerate(texts) if tuple(each[: len(text)]) == text)
        assert list(drafts) == head.drafts(text, features[whole], len(drafts))
        checked += 1
    assert checked > 60


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_that_was_not_fed_says_nothing_about_those_texts(target: Path, on_device: None, kind: str,
                                                                tells: bool) -> None:
    """Neither about what goes on after them. Other texts get the drafts that they would have had."""
    prompts, torches = [prompt[:30] for prompt in PROMPTS[:3]], torch.get_num_threads()
    options = {**eagle(target / kind), "block_size": 4, "max_num_batched_tokens": 200, "max_steps_in_flight": 1}
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, block_size=4) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(prompts, [GREEDY] * 3, use_tqdm=False)]
        texts = [list(prompt) + list(tokens) for prompt, tokens in zip(prompts, want, strict=True)]
        go_on = [o.outputs[0].token_ids for o in llm.generate(texts, [GREEDY] * 3, use_tqdm=False)]
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, **options) as llm:
        seen, pause = drafts_of(llm), Pause(llm._core.scheduler.speculator, 3, 7, tells)
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, [GREEDY] * 3, use_tqdm=False)]
        before = llm.metrics()["spec_draft_tokens"]
        assert found == want and pause.rested == 4 and before
        assert pause.asked_after == (0 if tells else 3), "who asked in vain was told so, and did not ask again"
        again = [o.outputs[0].token_ids for o in llm.generate(texts, [GREEDY] * 3, use_tqdm=False)]
        assert again == go_on and llm.metrics()["spec_draft_tokens"] == before, "their blocks have holes"
        # Those that say the same again get drafts until such a block takes the place of their own.
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, [GREEDY] * 3, use_tqdm=False)] == want
        other = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True, seed=7)  # which says something else
        llm.generate(prompts, [other] * 3, use_tqdm=False)
        assert llm.metrics()["spec_draft_tokens"] > 3 * before
        llm.check()
    torch.set_num_threads(1)
    head = PlainHead(target / kind, target)
    features = [head.features(target_states(target, text)) for text in texts]
    torch.set_num_threads(torches)
    for text, drafts in seen.items():
        whole = next(i for i, each in enumerate(texts) if tuple(each[: len(text)]) == text)
        assert list(drafts) == head.drafts(text, features[whole], len(drafts))
    assert seen


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_siblings_draft_from_their_common_prompt(target: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    many = SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True, seed=4, n=3)
    outputs = []
    for more in ({}, eagle(target / kind)):
        if more:
            monkeypatch.setattr(assembly, "build_worker", build)
        with LLM(str(target), skip_tokenizer_init=True, num_threads=1, block_size=4, **more) as llm:
            found = llm.generate([PROMPTS[3][:22]], many, use_tqdm=False)[0]
            outputs.append([one.token_ids for one in found.outputs])
            drafted = llm.metrics().get("spec_draft_tokens", 0)
    assert outputs[0] == outputs[1]
    assert drafted > 20


def test_accepted_tokens_are_caught_up_with_in_rows_of_one_captured_step(target: Path, on_device: None,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """After the prompts no pass of the head is one of any shape, which would have to be launched kernel by kernel."""
    taken: list[tuple[int, int]] = []
    mixed: list[int] = []
    wide, other = HeadRunner._decode_last, HeadRunner._run_mixed
    monkeypatch.setattr(HeadRunner, "_decode_last",
                        lambda self, rung, *more: taken.append((rung, self.span)) or wide(self, rung, *more))
    monkeypatch.setattr(HeadRunner, "_run_mixed", lambda self, *args: mixed.append(1) or other(self, *args))
    told(target, **eagle(target / "eagle"), max_num_batched_tokens=400, max_steps_in_flight=2)
    assert len(taken) > 20 and all(span == 5 for _, span in taken)
    assert len(mixed) <= 2


@pytest.mark.parametrize("family", test_mtp.FAMILIES)
def test_layers_trained_with_the_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = test_mtp.make_target(family, tmp_path)
    outputs = []
    for device in (False, True):
        if device:
            monkeypatch.setattr(assembly, "build_worker", build)
        with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, **test_mtp.MTP) as llm:
            found = llm.generate(PROMPTS, [GREEDY] * len(PROMPTS), use_tqdm=False)
            counts = [llm.metrics()[f"spec_{name}_tokens"] for name in ("draft", "accepted")]
            outputs.append(([o.outputs[0].token_ids for o in found], counts))
    assert outputs[0] == outputs[1]
    assert counts[0] > 100


@pytest.mark.parametrize(("field", "value"), [("kv_cache_dtype", "fp8")])
def test_what_heads_do_not_run_with_is_refused_by_name(target: Path, field: str, value: Any) -> None:
    from quire.config import EngineConfig

    config = EngineConfig.create(model=str(target), **{field: value}, **eagle(target / "eagle"))
    with pytest.raises(ConfigError, match=field) as error:
        speculation_of(config, None)  # type: ignore[arg-type]
    assert error.value.field == field
