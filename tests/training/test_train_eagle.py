"""Training a head: it learns, goes on where it was stopped, and guesses in the engine what it guessed in training."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.models.loader.source import resolve_model
from quire.training.eagle import Trainer
from quire.training.options import TrainingOptions
from quire.training.target import Target
from quire.training.texts import Texts, read_questions
from tests.checkpoints import make_checkpoint
from tests.eagle_heads import PlainHead, target_states
from tests.test_eagle import drafts_of, eagle

OPTIONS = TrainingOptions(steps=60, batch_tokens=1280, max_length=64, depth=3, draft_vocab=80, intermediate=64,
                          learning_rate=5e-3, eval_every=1000, save_every=1000)
PROMPTS = [[random.Random(i).randrange(3, 97) for _ in range(2 + i % 5)] for i in range(160)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    make_checkpoint(made, "llama")
    weights = load_file(made / "model.safetensors")
    for name in weights:  # a model that is sure of itself, and goes mostly by the last token: that can be learned fast
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 0.15
    weights["lm_head.weight"] = weights["lm_head.weight"] * 8
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def texts(folder: Path) -> Texts:
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1) as llm:
        found = llm.generate(PROMPTS, [greedy] * len(PROMPTS), use_tqdm=False)
    return Texts.of([(prompt, list(output.outputs[0].token_ids)) for prompt, output in
                     zip(PROMPTS, found, strict=True)])


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    torch.set_num_threads(1)
    return Target(resolve_model(str(folder)), "cpu", 1)


def quiet(_: str) -> None:
    pass


def test_a_trained_head_is_better_than_none_and_runs_in_the_engine(folder: Path, texts: Texts, target: Target,
                                                                   tmp_path: Path) -> None:
    trainer = Trainer(target, texts, OPTIONS)
    before = trainer.evaluate()
    after = trainer.train(tmp_path, quiet)
    assert after.loss < 0.8 * before.loss
    assert after.chain[0] > before.chain[0] + 0.1
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, **eagle(tmp_path, k=3)) as llm:
        seen = drafts_of(llm)
        outputs = llm.generate(PROMPTS[:4], greedy, use_tqdm=False)
        assert llm.metrics()["spec_acceptance_rate_at_1"] > 0.5 * after.chain[0]
    whole = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(PROMPTS, outputs, strict=False)]
    assert whole == [texts.text(i).tolist() for i in range(4)]
    head = PlainHead(tmp_path, folder)
    for text in whole:
        features = head.features(target_states(folder, text))
        for place in (len(text) // 2, len(text) - 5):
            drafts = seen.get(tuple(text[:place]))
            assert drafts is None or list(drafts) == head.drafts(text[:place], features, len(drafts))


def test_unrolled_drafts_are_those_of_decoding(folder: Path, texts: Texts, target: Target, tmp_path: Path) -> None:
    """Step j of training at a place is the j-th draft of a chain that began j places earlier, on the text's tokens."""
    trainer = Trainer(target, texts, OPTIONS)
    trainer.train(tmp_path, quiet)
    with torch.no_grad():  # what is exported is narrow: train's own weights are made so
        for part in trainer.head.parameters():
            part.copy_(part.bfloat16().float())
    trainer._rows = trainer._rows.bfloat16().float()
    index = trainer._held[0]
    batch = trainer._batch([index])
    text = texts.text(index).tolist()
    head = PlainHead(tmp_path, folder)
    features = head.features(target_states(folder, text))
    checked = 0
    with torch.no_grad():
        seen = target.see(batch.rows)
        guesses: list[dict[int, int]] = []
        for logits, _, places in trainer._unrolled(batch, seen):
            tokens = trainer.guessed[logits.argmax(-1)]
            guesses.append(dict(zip(places.tolist(), tokens.tolist(), strict=True)))
    for begin in guesses[0]:
        drafts = head.drafts(text[: begin + 1], features, 3)
        for j, draft in enumerate(drafts):
            assert guesses[j].get(begin + j, draft) == draft
            checked += begin + j in guesses[j]
            if begin + j + 1 >= len(text) or draft != text[begin + j + 1]:
                break  # training goes on along the text, drafting along the draft
    assert checked > 30


def test_a_stopped_run_goes_on_to_the_same_weights(texts: Texts, target: Target, tmp_path: Path) -> None:
    short = TrainingOptions(steps=8, batch_tokens=640, max_length=64, depth=2, draft_vocab=60, intermediate=48,
                            eval_every=1000, save_every=3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    Trainer(target, texts, short).train(whole, quiet)

    class Killed(Exception):
        pass

    first = Trainer(target, texts, short)
    save = first.save

    def killed(folder: Path, seconds: float = 0.0) -> None:
        save(folder, seconds)
        raise Killed

    first.save = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.train(parts, quiet)
    second = Trainer(target, texts, short)
    assert second.resume(parts) and second.step == 3
    second.train(parts, quiet)
    kept, resumed = (load_file(folder / "training.safetensors") for folder in (whole, parts))
    assert kept.keys() == resumed.keys()
    assert all(torch.equal(kept[name], resumed[name]) for name in kept)
    other = Trainer(target, texts, replace(short, steps=9))
    with pytest.raises(ConfigError, match="steps"):
        other.resume(parts)


def test_questions_are_read_or_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}, {"role": "assistant", '
                    '"content": "c"}]}\n')
    assert read_questions(path) == [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    for wrong in ("{", '{"text": 1}', '{"messages": []}'):
        path.write_text('{"prompt": "a"}\n' + wrong)
        with pytest.raises(ConfigError, match="line 2"):
            read_questions(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no conversation"):
        read_questions(path)
