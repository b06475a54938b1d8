"""With drafts or without, the tokens, their log-probabilities and the bits of the logits are the same."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import ConfigError
from quire.fuzz.run import _tokenizer
from quire.sampling.reference import ReferenceRow, probabilities
from tests.checkpoints import make_checkpoint
from tests.eagle_heads import make_head
from tests.engine_capture import Bits, record_logits
from tests.speculation.test_verify import chi_square_p_value

_REQUESTS = 40
"""Of 64 samples each."""

SHARED = [3 + i % 9 for i in range(40)]
PROMPTS = [SHARED[: 5 * i] + random.Random(i).choices(range(3, 97), k=3 + 7 * i % 31) for i in range(8)]


def params(index: int, **more: Any) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.4, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
        {"temperature": 0.3, "top_p": 0.9, "top_k": 20, "logit_bias": {5: 3.0, 6: 3.0}},
    ]
    values: dict[str, Any] = {"seed": 1000 + index, "max_tokens": 40, "ignore_eos": True, **kinds[index % 4]}
    return SamplingParams(**values | more)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama")
    # A draft that agrees now and then: the target's embeddings and head, and its first layer.
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file({name: tensor for name, tensor in weights.items() if ".layers." not in name or ".layers.0." in name},
              folder / "draft" / "model.safetensors")
    return folder


def speculating(method: str = "ngram", k: int = 5, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": k, "adaptive": False, **more}}


def run(folder: Path, **options: Any) -> tuple[Bits, list[Any], dict[str, Any]]:
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, **options) as llm:
        # What ranks compute is not looked into: log-probabilities follow from it.
        bits: Bits = {} if "distributed_executor_backend" in options else record_logits(llm)
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        llm.check()
        found = [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].finish_reason) for o in outputs]
        return bits, found, llm.metrics()


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return run(checkpoint)


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 7},
    {"block_size": 1, "num_kv_blocks": 110},
    {"block_size": 4, "num_kv_blocks": 28},
    {"block_size": 4, "num_kv_blocks": 28, "swap_space": 0.01, "preemption_mode": "swap"},
    {"enable_prefix_caching": False},
    {"max_steps_in_flight": 3},
], ids=lambda options: "-".join(options) or "default")
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "skip_layers"])
def test_tokens_logprobs_and_bits_are_those_without_drafts(checkpoint: Path, plain: Any, method: str,
                                                           options: dict[str, Any]) -> None:
    more = {"draft_model": {"model": str(checkpoint / "draft")}, "skip_layers": {"skipped_layers": [1]}}
    bits, found, metrics = run(checkpoint, **options, **speculating(method, **more.get(method, {})))
    assert found == plain[1]
    assert bits == plain[0]
    assert metrics["spec_accepted_tokens"] > 20
    assert metrics["spec_draft_tokens"] > metrics["spec_accepted_tokens"]


def test_the_adaptive_number_of_drafts_changes_no_token(checkpoint: Path, plain: Any) -> None:
    assert run(checkpoint, **speculating(adaptive=True))[1] == plain[1]


@pytest.mark.parametrize("fault, said", [
    ("absent", "there is no model"),
    ("weights missing", "model.safetensors"),
    ("architecture", "architecture"),
    ("vocabulary", "vocabulary of 98"),
    ("positions", "32 positions"),
])
def test_what_is_wrong_with_a_draft_model_is_said_of_it_and_not_of_the_target(
        checkpoint: Path, tmp_path: Path, fault: str, said: str) -> None:
    draft = tmp_path / "small"
    if fault == "positions":
        draft.mkdir()
        make_checkpoint(draft, "gpt2", n_positions=32)
    elif fault != "absent":
        changed = {"architecture": {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"},
                   "vocabulary": {"vocab_size": 98}}.get(fault, {})
        draft.mkdir()
        config = json.loads((checkpoint / "draft" / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(config | changed))
        if fault != "weights missing":
            (draft / "model.safetensors").write_bytes((checkpoint / "draft" / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=f"(?s)^speculative_config model .*{said}") as error:
        LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, **speculating("draft_model", model=str(draft)))
    assert error.value.field == "speculative_config"


def test_several_samples_and_beams_in_one_batch(checkpoint: Path) -> None:
    def outputs(**options: Any) -> list[Any]:
        with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, **options) as llm:
            llm.add_request("n", PROMPTS[3], params(1, n=3))
            llm.add_request("best", PROMPTS[4], params(3, n=1, best_of=3))
            llm.add_request("beams", PROMPTS[5], BeamSearchParams(beam_width=3, max_tokens=12))
            llm.add_request("one", PROMPTS[6], params(0))
            last = {}
            while llm.has_unfinished_requests():
                for output in llm.step():
                    last[output.request_id] = output
                llm.check()
            return [(name, [(o.token_ids, o.cumulative_logprob, o.score) for o in last[name].outputs])
                    for name in sorted(last)]

    assert outputs(**speculating()) == outputs()


@pytest.mark.parametrize("length", range(1, 14))
def test_max_tokens_inside_a_draft_ends_there(checkpoint: Path, plain: Any, length: int) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, **speculating(k=8)) as llm:
        output = llm.generate([PROMPTS[0]], params(0, max_tokens=length), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == plain[1][0][0][:length]
    assert output.finish_reason == "length"


def test_a_stop_token_inside_a_draft_ends_there_and_nothing_after_it_is_shown_or_cached(
        checkpoint: Path, plain: Any) -> None:
    expected = plain[1][0][0]
    stop = expected[-1]
    cut = expected[: expected.index(stop) + 1]
    for k in range(1, 9):
        with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, block_size=1, **speculating(k=k)) as llm:
            output = llm.generate([PROMPTS[0]], params(0, stop_token_ids=[stop]), use_tqdm=False)[0].outputs[0]
            assert output.token_ids == cut
            assert output.finish_reason == "stop"
            # Every token that has KV is cached, but for the last one drawn, which never had any.
            assert llm.metrics()["kv_blocks_cached"] == len(PROMPTS[0]) + len(cut) - 1


def test_refused_drafts_never_reach_the_prefix_cache(checkpoint: Path) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, block_size=1, **speculating(k=8)) as llm:
        known = set()
        cache = llm._core.scheduler.cache
        for i, prompt in enumerate(PROMPTS):
            output = llm.generate([prompt], params(i), use_tqdm=False)[0].outputs[0]
            text = [*prompt, *output.token_ids]
            known |= {tuple(text[:n]) for n in range(1, len(text))}
            assert llm.metrics()["kv_blocks_cached"] == len(known)
        assert llm.metrics()["spec_draft_tokens"] > llm.metrics()["spec_accepted_tokens"]
        assert cache.num_evicted == 0


def test_an_abort_between_steps_with_drafts_frees_everything(checkpoint: Path) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, max_steps_in_flight=2,
             **speculating(k=8)) as llm:
        for steps in range(1, 12):
            llm.add_request("r", PROMPTS[0], params(0))
            for _ in range(steps):
                llm.step()
            llm.abort("r")
            while llm.has_unfinished_requests():
                llm.step()
            llm.check()
            assert llm.metrics()["kv_blocks_used"] == 0


def test_a_request_knows_its_own_drafts(checkpoint: Path) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, **speculating()) as llm:
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        metrics = llm.metrics()
    counts = [output.metrics.counts for output in outputs]
    assert sum(c.draft_tokens for c in counts) == metrics["spec_draft_tokens"]
    assert sum(c.accepted_tokens for c in counts) == metrics["spec_accepted_tokens"]
    assert sum(c.decode_steps for c in counts) == metrics["spec_decode_steps"]
    for output, c in zip(outputs, counts, strict=True):
        # The first token is the prompt's; every decode step gives one and the drafts it accepted.
        assert len(output.outputs[0].token_ids) == 1 + c.decode_steps + c.accepted_tokens
    rates = [metrics[f"spec_acceptance_rate_at_{place}"] for place in range(1, 6)]
    assert 1.0 > rates[0] > rates[-1] > 0.0
    assert metrics["spec_tokens_per_step"] > 1.0


@pytest.mark.parametrize("place", range(1, 9))
def test_accepted_drafts_after_the_end_are_no_tokens_of_any_step(checkpoint: Path, place: int) -> None:
    """A draft model that is the target itself: all its drafts are right, those after a stop token too."""
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1,
             **speculating("draft_model", k=6, model=str(checkpoint))) as llm:
        text = llm.generate([[3, 4, 5]], params(0), use_tqdm=False)[0].outputs[0].token_ids
        before = llm.metrics()
        output = llm.generate([[3, 4, 5]], params(0, stop_token_ids=[text[place]]), use_tqdm=False)[0].outputs[0]
        after = llm.metrics()
    assert after["spec_acceptance_rate"] == 1.0
    # The first token is the prompt's.
    assert after["spec_decode_tokens"] - before["spec_decode_tokens"] == len(output.token_ids) - 1


def test_what_follows_a_stop_token_is_not_proposed_to_others(checkpoint: Path) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, num_threads=1, **speculating("suffix", k=8)) as llm:
        text = llm.generate([PROMPTS[0]], params(0), use_tqdm=False)[0].outputs[0].token_ids
        stop = next(token for i, token in enumerate(text[4:], 4) if token not in text[:i])
        llm.generate([PROMPTS[0]], params(0, stop_token_ids=[stop]), use_tqdm=False)
        known = llm._core.scheduler.speculator._source._domains
        kept = next(iter(known.values())).generations[1].text
    assert list(kept[-2:]) == [stop, -1]


@pytest.mark.parametrize("method", ["ngram", "ngram tree", "suffix", "suffix tree", "draft_model", "draft_model tree",
                                    "skip_layers", "skip_layers tree", "eagle", "eagle tree"])
def test_continuations_under_rejection_sampling_are_distributed_as_plain_ones(
        tmp_path: Path, method: str) -> None:
    """Three tokens of a model of five: the first is drawn plainly, the other two by way of drafts."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 5, "hidden_size": 16, "intermediate_size": 16,
              "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "silu",
              "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True}
    for name, layers in (("target", 2), ("draft", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    own: dict[str, Any] = {"draft_model": {"model": str(tmp_path / "draft"), "load_format": "dummy"},
                           "eagle": {"model": str(make_head(tmp_path / "head", tmp_path / "target", "eagle"))}}
    kind, _, shape = method.partition(" ")
    chosen = own.get(kind, {}) | ({"tree": {"width": 3, "depth": 2, "nodes": 5}} if shape else {})
    # Weights of this seed make p and q differ so much that a residual of p instead of p - q is seen (p-value 1e-60);
    # with the default's it is not.
    options: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy", "seed": 1, "num_threads": 1}
    prompt = [1, 2, 3, 1, 2, 4, 1, 2]
    # A tree's nodes lie where the next tokens will: there is room for five of them only where so many may come.
    wanted = SamplingParams(temperature=0.7, top_p=0.95, presence_penalty=0.4, max_tokens=7 if shape else 3,
                            n=64, ignore_eos=True)
    with LLM(str(tmp_path / "target"), **options) as llm:
        expected = _exact_continuations(llm, prompt, wanted)
    config_of = speculating(kind, k=2, verifier="rejection", **chosen)
    counts: Counter[tuple[int, ...]] = Counter()
    requests = _REQUESTS // 3 if shape else _REQUESTS  # trees are judged one by one
    with LLM(str(tmp_path / "target"), **options, **config_of) as llm:
        for seed in range(requests):
            output = llm.generate([prompt], replace(wanted, seed=seed), use_tqdm=False)[0]
            counts.update(tuple(one.token_ids[:3]) for one in output.outputs)
        metrics = llm.metrics()
    assert 0.02 < metrics["spec_acceptance_rate"] < 0.98
    assert (metrics["spec_draft_tokens_at_1"] > 1.2 * metrics["spec_verifications"]) == bool(shape)
    total = 64 * requests
    places = sorted(expected)
    assert set(counts) <= {place for place in places if expected[place] > 0}
    p_value = chi_square_p_value(np.array([counts[place] for place in places]),
                                 np.array([expected[place] * total for place in places]))
    assert p_value > 1e-4


def _exact_continuations(llm: LLM, prompt: list[int], wanted: SamplingParams) -> dict[tuple[int, ...], float]:
    """Every continuation of three tokens with its probability, from the model's own logits."""
    found = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, chance in found.items():
            text = [*prompt, *tokens]
            ask = SamplingParams(max_tokens=1, logprobs=5, temperature=0.0, ignore_eos=True)
            entry = llm.generate([text], ask, use_tqdm=False)[0].outputs[0].logprobs[0]
            logits = [entry[token].logprob for token in range(5)]
            shares = probabilities(logits, ReferenceRow(wanted, 0, 0, prompt, list(tokens)))
            longer.update({(*tokens, token): chance * float(share) for token, share in enumerate(shares)})
        found = longer
    return found


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_stop_string_inside_a_draft_cuts_text_tokens_and_logprobs_where_plain_decoding_does(
        tmp_path: Path, method: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
              "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    prompt = [3, 4, 5, 6] * 5
    free = SamplingParams(max_tokens=80, temperature=0.7, seed=5, ignore_eos=True, logprobs=1,
                          allowed_token_ids=[1, 2, 3, 4])
    options: dict[str, Any] = {"load_format": "dummy", "seed": 3, "num_threads": 1}
    with LLM(str(tmp_path), **options) as plain, LLM(str(tmp_path), **options, **speculating(method, k=8)) as drafting:
        text = plain.generate([prompt], free, use_tqdm=False)[0].outputs[0].text
        assert len(text) > 40
        for at in range(0, 36, 3):
            for include in (False, True):
                wanted = replace(free, stop=[text[at : at + 3]], include_stop_str_in_output=include)
                found = [llm.generate([prompt], wanted, use_tqdm=False)[0].outputs[0] for llm in (plain, drafting)]
                assert found[1].text == found[0].text
                assert found[1].token_ids == found[0].token_ids
                assert found[1].logprobs == found[0].logprobs
                assert (found[1].finish_reason, found[1].stop_reason) == (found[0].finish_reason, found[0].stop_reason)
        assert drafting.metrics()["spec_accepted_tokens"] > 20
        assert drafting.metrics()["kv_blocks_used"] == 0
