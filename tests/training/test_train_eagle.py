"""Training a head: it learns, goes on where it was stopped, and guesses in the engine what it guessed in training."""

from __future__ import annotations

import argparse
import math
import random
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.bench.speculation.texts import TEXTS
from quire.child import child_environment, module_command
from quire.cli import train_eagle
from quire.cli.commands import UsageError
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.quantized import UNIT
from quire.models.loader.source import resolve_model
from quire.training import eagle as eagle_training
from quire.training import generate, parts, remembered
from quire.training.card import write_card
from quire.training.eagle import Acceptance, Trainer
from quire.training.given import read_questions
from quire.training.options import TrainingOptions
from quire.training.origin import origin_of
from quire.training.questions import Exchange, question
from quire.training.target import Target
from quire.training.texts import Generator, Texts
from tests.checkpoints import make_checkpoint
from tests.eagle_heads import PlainHead, target_states
from tests.test_eagle import drafts_of, eagle

OPTIONS = TrainingOptions(steps=60, batch_tokens=1280, max_length=64, depth=3, draft_vocab=80, intermediate=64,
                          learning_rate=5e-3, eval_every=1000, save_every=1000)
PROMPTS = [[random.Random(i).randrange(3, 97) for _ in range(2 + i % 5)] for i in range(160)]


def sure_of_itself(made: Path, **sizes: int) -> Path:
    """A model that goes mostly by the last token: that can be learned fast."""
    make_checkpoint(made, "llama", **sizes)
    weights = load_file(made / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 0.15
    weights["lm_head.weight"] = weights["lm_head.weight"] * 8
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def texts_of(folder: Path) -> Texts:
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1) as llm:
        found = llm.generate(PROMPTS, [greedy] * len(PROMPTS), use_tqdm=False)
    return Texts.of([(prompt, list(output.outputs[0].token_ids)) for prompt, output in
                     zip(PROMPTS, found, strict=True)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sure_of_itself(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts(folder: Path) -> Texts:
    return texts_of(folder)


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


def test_a_head_stored_in_4_bits_is_trained_in_them(texts: Texts, target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):  # 48 columns are no whole groups
        Trainer(target, texts, replace(OPTIONS, weights="int4"))
    folder = sure_of_itself(tmp_path, hidden_size=64, num_attention_heads=4)
    texts, target = texts_of(folder), Target(resolve_model(str(folder)), "cpu", 1)
    head = tmp_path / "head"
    head.mkdir()
    trainer = Trainer(target, texts, replace(OPTIONS, weights="int4"))
    first = trainer.head.q.detach().clone()
    after = trainer.train(head, quiet)
    assert not torch.equal(first, trainer.head.q), "rounding lets no gradient through"
    by = trainer.head.matrices(torch.float32)
    stored = dict(resolve_model(str(head)).weights("float32"))
    for name, part in (("fc", "fc"), ("midlayer.self_attn.o_proj", "o"), ("midlayer.mlp.down_proj", "down")):
        torch.testing.assert_close(stored[f"{name}.weight"], by[part].detach(), rtol=0, atol=1e-7)
        assert len(by[part].detach().view(-1, UNIT)[5].unique()) <= 16
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, **eagle(head, k=3)) as llm:
        llm.generate(PROMPTS[:12], greedy, use_tqdm=False)
        assert llm.metrics()["spec_acceptance_rate_at_1"] > 0.7 * after.chain[0] > 0.1


def test_unrolled_drafts_are_those_of_decoding(folder: Path, texts: Texts, target: Target, tmp_path: Path) -> None:
    """Step j of training at a place is the j-th draft of a chain that began j places earlier, on the text's tokens."""
    trainer = Trainer(target, texts, OPTIONS)
    trainer.train(tmp_path, quiet)
    with torch.no_grad():  # what is exported is narrow: train's own weights are made so
        for part in trainer.head.parameters():
            part.copy_(part.bfloat16().float())
    trainer._guessing_rows = trainer._guessing_rows.bfloat16().float()
    index = trainer._held[0]
    batch = trainer._batch([index])
    text = texts.text(index).tolist()
    head = PlainHead(tmp_path, folder)
    features = head.features(target_states(folder, text))
    checked = 0
    with torch.no_grad():
        seen, by = target.see(batch.rows), trainer.head.matrices(torch.float32)
        guesses: list[dict[int, int]] = []
        for kept, places in trainer._unrolled(batch, trainer.head.fused(seen.states, by), by):
            tokens = trainer.guessed[trainer.head.read_out(kept, trainer._guessing_rows).argmax(-1)]
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

    def killed(folder: Path, seconds: float = 0.0) -> None:
        Trainer.save(first, folder, seconds)
        raise Killed

    replace_file = Path.replace

    def killed_before(path: Path, new: Path) -> Path:
        if new.name == "training.safetensors":
            raise Killed
        return replace_file(path, new)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "replace", killed_before)
        first.train(parts, quiet)
    assert not Trainer(target, texts, short).resume(parts)  # half of a checkpoint is none
    first = Trainer(target, texts, short)
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
    with pytest.raises(ConfigError, match="on other texts"):
        Trainer(target, Texts.joined([texts, texts]), short).resume(parts)


def test_an_interrupted_run_ends_after_its_step_with_a_checkpoint(texts: Texts, target: Target, tmp_path: Path) -> None:
    trainer, said = Trainer(target, texts, OPTIONS), list[str]()

    def interrupted(step: int, _: float) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), train_eagle._stopping(trainer, said.append):
        trainer.train(tmp_path, quiet, interrupted)
    assert said[-1] == "stopped after step 3: the same command goes on from the last checkpoint"
    assert signal.getsignal(signal.SIGINT) is before and (tmp_path / "model.safetensors").is_file()
    again = Trainer(target, texts, OPTIONS)
    assert again.resume(tmp_path) and again.step == 3


@pytest.mark.parametrize("name", ["texts.safetensors", "training.safetensors", "training.json"])
def test_a_damaged_file_is_named_with_what_to_do(texts: Texts, target: Target, tmp_path: Path, name: str) -> None:
    trainer = Trainer(target, texts, OPTIONS)
    trainer.save(tmp_path)
    texts.save(tmp_path / "texts.safetensors", {})
    assert trainer.resume(tmp_path) and not list(tmp_path.glob("*.part"))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match=rf"{name} cannot be read \(.*\): delete .* and the same command"):
        Texts.load(tmp_path / name) if name.startswith("texts") else trainer.resume(tmp_path)


def test_what_the_target_said_is_remembered_bit_for_bit(texts: Texts, target: Target,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(target, texts, OPTIONS)
    seen = [trainer._see(trainer._batch(some)) for some in ([9, 3, 20], [4, 5])]
    asked = []
    monkeypatch.setattr(target, "see", asked.append)
    batch = trainer._batch([3, 4, 5, 9])
    again = trainer._see(batch)
    assert not asked
    for row, (first, place) in enumerate(((0, 1), (1, 0), (1, 1), (0, 0))):
        length = trainer._lengths[batch.texts[row]]
        for name in ("states", "final", "best"):
            assert torch.equal(getattr(again, name)[row, :length], getattr(seen[first], name)[place, :length])
    assert trainer._loss(batch, again).isfinite()  # with padding whose states are another text's
    monkeypatch.setattr(remembered, "_SHARE", 0.0)
    monkeypatch.setattr(target, "see", lambda rows: (asked.append(rows), seen[0])[1])
    small = Trainer(target, texts, OPTIONS)
    before = len(asked)
    for _ in range(2):
        small._see(trainer._batch([3, 9]))
    assert len(asked) == before + 2  # no room: asked each time


def test_questions_are_read_or_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}, {"role": "assistant", '
                    '"content": "c"}]}\n')
    assert read_questions(path) == [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    for wrong, why in (
        ("{", "is not JSON"), ("[1, 2]", "needs an object"), ('{"text": 1}', 'has neither "messages" nor "prompt"'),
        ('{"prompt": "a", "messages": []}', 'has both "messages" and "prompt"'),
        ('{"prompt": 5}', '"prompt" must be a text, not 5'), ('{"prompt": " "}', '"prompt" is empty'),
        ('{"messages": "hello"}', "\"messages\" must be a list, not 'hello'"),
        ('{"messages": []}', "no message of the user"), ('{"messages": ["a"]}', "must be an object, not 'a'"),
        ('{"messages": [{"role": "user"}]}', "both texts"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "both texts"),
        ('{"messages": [{"role": "alien", "content": "a"}]}', "role 'alien' is none of"),
        ('{"messages": [{"role": "user", "content": ""}]}', "of the user is empty"),
    ):
        path.write_text('{"prompt": "a"}\n' + wrong)
        with pytest.raises(ConfigError, match=f"line 2.*{re.escape(why)}"):
            read_questions(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no conversation"):
        read_questions(path)
    path.write_bytes(b"\xff\xfe")
    for unreadable in (path, tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_questions(unreadable)


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train_eagle.add_arguments(parser)
    return parser.parse_args(given)


def made_before(out: Path, questions: Path) -> tuple[str, ...]:
    """A folder with texts of a file of questions; the arguments that they were made with."""
    out.mkdir()
    questions.write_text('{"prompt": "a"}\n')
    Texts.of([([1, 2], [3, 4])]).save(out / "texts.safetensors",
                                      origin_of("smollm2-135m", str(questions), None, 0, 64, 384))
    return "--out", str(out), "--data", str(questions), "--max-length", "64"


def test_texts_of_other_questions_are_not_trained_on(tmp_path: Path) -> None:
    """A folder goes on with its own texts: those of another file, or none, are refused by name."""
    questions, out = tmp_path / "questions.jsonl", tmp_path / "head"
    asked = made_before(out, questions)
    first = (out / "texts.safetensors").read_bytes()
    Texts.load(out / "texts.safetensors").save(out / "texts.safetensors", Texts.origin(out / "texts.safetensors"))
    assert (out / "texts.safetensors").read_bytes() == first
    for more, said in ((["--seed", "1"], "made with --seed 0"), (["--max-answer", "9"], "made with --max-answer 384")):
        with pytest.raises(ConfigError, match=said):
            train_eagle._texts(parsed(*asked, *more), out, None)
    with pytest.raises(ConfigError, match="made with --data"):
        train_eagle._texts(parsed("--out", str(out), "--self", "9", "--max-length", "64"), out, None)
    assert len(train_eagle._texts(parsed(*asked), out, None)) == 1
    with pytest.raises(UsageError, match="no file"):
        train_eagle._check(parsed("--out", str(out), "--data", str(tmp_path / "nothing"), "--steps", "1"))


def test_questions_that_changed_under_their_name_are_other_questions(tmp_path: Path) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "head"
    asked = made_before(out, questions)
    questions.write_text('{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"when .*questions.jsonl had other contents.*delete what is named texts"):
        train_eagle._texts(parsed(*asked), out, None)


def test_too_few_texts_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else more questions would be refused, as those of other texts."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "a"}\n')
    asked = parsed("--out", str(tmp_path), "--data", str(questions), "--max-length", "64", "--depth", "2")
    made = [([1, 2], [3, 4, 5])]
    monkeypatch.setattr(generate, "make_texts", lambda *_: Texts.of(made))
    with pytest.raises(ConfigError, match="of 1, 1 have answers longer than --depth 2, and two are needed"):
        train_eagle._texts(asked, tmp_path, None)
    questions.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    made.append(([6], [7, 8, 9]))
    assert len(train_eagle._texts(asked, tmp_path, None)) == 2


@pytest.mark.parametrize("given, said", [
    (["--learning-rate", "-1"], "--learning-rate must be above 0"),
    (["--learning-rate", "nan"], "--learning-rate must be above 0"),
    (["--time-limit", "nan"], "--time-limit must be above 0"),
    (["--train-seconds", "-5"], "--train-seconds must be above 0"),
    (["--generate-seconds", "0"], "--generate-seconds must be above 0"),
    (["--feature-weight", "-1"], "--feature-weight must not be negative"),
    (["--weight-decay", "nan"], "--weight-decay must not be negative"),
    (["--learning-rate", "inf"], "--learning-rate must not be infinite"),
    (["--num-threads", "0"], "--num-threads must be at least 1"),
    (["--depth", "384"], "--depth 384 must be below --max-answer 384"),
])
def test_options_that_no_run_can_have_are_refused_by_name(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train_eagle._check(parsed("--out", "head", "--self", "9", "--steps", "1", *given))


@pytest.mark.parametrize("family, given, said", [
    ("llama", ["--start", "target", "--intermediate", "88"], "no start for this head"),
    ("llama", ["--weights", "int4", "--intermediate", "72"], "for int4"),
    ("llama", ["--max-length", "257"], "--max-length 257 is more than the 256 positions"),
    ("llama", ["--max-length", "9", "--depth", "8"], "--depth 8 is too much for texts of at most --max-length 9"),
    ("llama", ["--intermediate", "99999999999"], "--intermediate 99999999999 takes .* GiB to train"),
    ("gemma2", [], "Gemma2ForCausalLM changes its embeddings"),
    ("deepseek_v3", [], "DeepseekV3ForCausalLM attends in a latent space"),
    ("phi3", [], "Phi3ForCausalLM does not turn its heads as a whole"),
])
def test_what_cannot_be_trained_is_refused_before_texts_are_made(tmp_path: Path, family: str, given: list[str],
                                                                 said: str) -> None:
    make_checkpoint(tmp_path / "model", family)
    asked = parsed("--model", str(tmp_path / "model"), "--out", str(tmp_path / "head"), "--self", "100", *given)
    with pytest.raises(ConfigError, match=said):
        train_eagle.run(asked)
    assert not (tmp_path / "head").exists()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out: there can be no folder"):
        train_eagle._folder(str(tmp_path / "file" / "head"))


def test_the_card_says_what_was_asked_and_how_long_all_runs_took(tmp_path: Path) -> None:
    found = Acceptance((0.5, 0.25), 9.0, 1.75)
    for options, said in (({"data": "/some/where/questions.jsonl", "seed": 3}, "(questions of questions.jsonl, and"),
                          ({"data": None, "own": 900}, "(questions that the model made up, and")):
        write_card(tmp_path, "smollm2-135m", options, found, 12, 34.0, 5678)
        card = (tmp_path / "README.md").read_text()
        assert "5,678 tokens " + said + " answers), 12 steps, 34 s" in card and "/some/where" not in card


def test_a_head_begins_at_the_last_layer_of_its_target(folder: Path, texts: Texts, target: Target,
                                                       tmp_path: Path) -> None:
    width = target.decoder.spec.layers[-1].mlp.intermediate
    options = replace(OPTIONS, intermediate=width, start="target", steps=12, save_every=5)
    stored = load_file(folder / "model.safetensors")
    layer = f"model.layers.{target.decoder.spec.num_layers - 1}."
    trainer, hidden = Trainer(target, texts, options), target.decoder.spec.hidden_size
    near = {"rtol": 1e-2, "atol": 1e-2}
    for part, name, norm in (("q", "self_attn.q_proj", "input_layernorm"), ("v", "self_attn.v_proj", "input_layernorm"),
                             ("gate", "mlp.gate_proj", None), ("up", "mlp.up_proj", None)):
        want = stored[f"{layer}{name}.weight"].float()
        want = want * stored[f"{layer}{norm}.weight"].float() if norm else want
        torch.testing.assert_close(getattr(trainer.head, part)[:, -hidden:].detach(), want, **near)
    seen = target.see(trainer._batch(trainer._trained[:2]).rows)
    fused = trainer.head.fused(seen.states, trainer.head.matrices(torch.float32))[:, 1:].detach()
    last = seen.states[:, 1:, -hidden:]
    assert torch.cosine_similarity(fused, last, -1).mean() > 0.9
    before, after = trainer.evaluate(), trainer.train(tmp_path, quiet)
    assert after.loss < before.loss
    again = tmp_path / "again"
    again.mkdir()
    Trainer(target, texts, options).train(again, quiet)
    one, other = (load_file(path / "training.safetensors") for path in (tmp_path, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ConfigError, match="start"):
        Trainer(target, texts, replace(options, start="random")).resume(tmp_path)
    with pytest.raises(ConfigError, match="--intermediate"):
        Trainer(target, texts, replace(options, intermediate=width + 8))
    assert not Trainer(target, texts, replace(options, start="auto", intermediate=width + 8)).begins_at_target


def test_a_limited_time_is_kept_and_goes_on_where_it_was(texts: Texts, target: Target, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def monotonic() -> float:
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(eagle_training, "time", SimpleNamespace(monotonic=monotonic))
    limited = replace(OPTIONS, steps=1_000_000, max_seconds=10.0, eval_every=5)
    first = Trainer(target, texts, limited)
    first.train(tmp_path, quiet)
    assert 7.0 < now[0] < 13.0  # with the last look at held-out text
    assert first.step > 4 and (tmp_path / "model.safetensors").is_file()
    assert first._rate(10.0) == pytest.approx(0.03 * limited.learning_rate)
    second = Trainer(target, texts, limited)
    assert second.resume(tmp_path) and second.step == first.step
    assert 0.4 < second._rate(0.0) / limited.learning_rate < 0.7  # half of the time of both runs is over


class FakeEngine:
    """Answers with one token a step, as text too, without an end."""

    max_model_len = 500

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [len(text) % 90])
        self.running: dict[str, tuple[Any, SamplingParams, int]] = {}
        self.aborted: set[str] = set()
        self.seen: list[Any] = []

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return f"<{messages[0]['content']}>"

    def add_request(self, name: str, prompt: Any, params: SamplingParams) -> None:
        self.seen.append(prompt)
        self.running[name] = (prompt, params, 0)

    def abort(self, names: list[str]) -> None:
        self.aborted |= set(names)

    def step(self, until_done: Any) -> list[Any]:
        found = []
        for name, (prompt, params, made) in list(self.running.items()):
            assert name in until_done
            self.running[name] = prompt, params, made + 1
            if made + 1 == params.max_tokens or name in self.aborted:
                del self.running[name]
                one = SimpleNamespace(text="so. it is. ", token_ids=list(range(made + 1)),
                                      finish_reason="abort" if name in self.aborted else "length")
                found.append(SimpleNamespace(request_id=name, finished=True, prompt_token_ids=prompt, outputs=[one]))
        return found


def test_answers_are_made_until_there_are_enough_or_the_time_is_up() -> None:
    engine = FakeEngine()
    pairs = list(Generator(engine, 3, 40, at_once=6).converse(1000))  # type: ignore[arg-type]
    assert 1000 <= sum(len(answer) for _, answer in pairs) < 1400
    assert any(isinstance(prompt, dict) for prompt in engine.seen)  # the model goes on from a few words
    again = list(Generator(FakeEngine(), 3, 40, at_once=6).converse(1000))  # type: ignore[arg-type]
    assert again == pairs
    short = list(Generator(FakeEngine(), 3, 10, at_once=6).converse(100))  # type: ignore[arg-type]
    assert sum(len(answer) for _, answer in short) >= 100  # as long as they may be, so not cut off
    late = Generator(FakeEngine(), 3, 1 << 20, deadline=time.monotonic() + 0.3, at_once=6)  # type: ignore[arg-type]
    began = time.monotonic()
    cut = list(late.converse(1 << 40))
    assert time.monotonic() - began < 2.0 and 0 < len(cut) <= 6
    assert all(len(answer) > 24 for _, answer in cut)


class Killed(Exception):
    pass


@pytest.mark.parametrize("asked", ["data", "own"])
def test_texts_that_were_written_before_a_kill_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  asked: str) -> None:
    """Those of a file are the same in the end as without the kill; a model asks itself for the tokens that lack."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"prompt": "{"x" * (number % 40)}y"}}\n' for number in range(60)))
    monkeypatch.setattr(parts, "_TOKENS", 200)
    options = generate.GenerationOptions("model", "cpu", 3, 500, 40, data=str(questions) if asked == "data" else None,
                                         tokens=2000 * (asked == "own"))
    engines = list[FakeEngine]()

    def run(folder: Path, most: float = math.inf) -> Texts:
        """Killed before more answers than that are done."""
        def by_engine(one: generate.GenerationOptions, where: Path, say: Any) -> None:
            engines.append(FakeEngine())
            generator = Generator(engines[-1], one.seed, one.max_answer, at_once=6)  # type: ignore[arg-type]
            pairs = generator._pairs
            monkeypatch.setattr(generator, "_pairs", lambda fresh: cut(pairs(fresh), most))
            generate._collect(generator, one, where, say)

        monkeypatch.setattr(generate, "_by_engine", by_engine)
        folder.mkdir(exist_ok=True)
        return generate.make_texts(options, folder, quiet)

    def cut(pairs: Any, most: float) -> Any:
        for number, pair in enumerate(pairs):
            if number >= most:
                raise Killed
            yield pair

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "parts", 30)
    kept = parts.written(tmp_path / "parts")
    again = run(tmp_path / "parts")
    assert len(kept) == 30 and len(again) > 30
    parts.claim(tmp_path / "new", {"seed": 1})
    parts.claim(tmp_path / "new", {"seed": 2})  # nothing was written: no other texts
    (tmp_path / "parts" / "origin.json").write_text('{"seed": 1}')
    with pytest.raises(ConfigError, match="made with --seed 1"):
        parts.claim(tmp_path / "parts", {"seed": 2})
    assert len(engines[-1].seen) < len(engines[0].seen)
    if asked == "data":
        assert torch.equal(again.tokens, whole.tokens) and torch.equal(again.begins, whole.begins)
    else:
        assert 2000 <= again.num_answered < 2400
        assert engines[-1].seen[:6] != engines[0].seen[:6]


def test_a_process_that_makes_texts_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Here with one that has ended before: nothing is read, made or said."""
    command = module_command("quire.training.generate", "{}", str(tmp_path / "texts"), "1")
    ended = subprocess.run(command, env=child_environment(), capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")


def test_questions_ask_about_answers_given_before_and_never_what_is_measured() -> None:
    draw, asked, further, composed = random.Random(1), set(), 0, []
    for _ in range(3000):
        made = question(draw, [Exchange("What do bees do?", "Bees dance. They fly.")])
        asked.add(made.text)
        goes_on = made.messages()[-2:-1] == [{"role": "assistant", "content": "Bees dance. They fly."}]
        further += goes_on
        if made.whole and not goes_on and "Bees dance" not in made.text:
            composed.append(made.text)  # neither goes on with an answer nor is gone on with
    assert any("Bees dance" in one for one in asked) and 100 < further < 500
    assert len(composed) > 1000 and len(set(composed)) > 0.9 * len(composed)
    assert not any(mark in one for one in asked for mark in "{}")
    assert not asked & {text for kind in TEXTS.values() for text in kind.values()}
