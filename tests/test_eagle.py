"""EAGLE heads: the drafts of an independent reference, and the tokens and bits of decoding without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.bench.cpu.accuracy import decoder_of
from quire.config import EngineConfig
from quire.engine.assembly.ranks import check_parallel
from quire.errors import ConfigError, ModelLoadError
from quire.fuzz.head import write_head
from quire.fuzz.run import _tokenizer
from quire.models.heads.build import build_head, read_head
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.scheduler.plan import PlanEntry
from quire.training.rounded import PACKED_CONFIG, ROUNDED_CONFIG, packed, rounded
from quire.worker.drafter import Drafter
from tests.checkpoints import SMALL, make_checkpoint
from tests.eagle_heads import PlainHead, make_head, target_states
from tests.test_draft_trees import moves_counted
from tests.test_speculation import PROMPTS, params, run

K = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layers say little, so that a head that knows the last token guesses some of what follows."""
    folder = tmp_path_factory.mktemp("target")
    make_checkpoint(folder, "llama")
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 0.15
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for kind in ("eagle", "eagle3"):
        make_head(folder / kind, folder, kind)
    return folder


def eagle(head: Path, k: int = K, **more: Any) -> dict[str, Any]:
    drafts = {} if "depth" in more.get("tree", {}) else {"num_speculative_tokens": k}
    return {"speculative_config": {"method": "eagle", "model": str(head), "adaptive": False, **drafts, **more}}


@pytest.fixture(scope="module")
def plain(target: Path) -> Any:
    return run(target)


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 7},
    {"block_size": 1, "num_kv_blocks": 110},
    {"block_size": 4, "num_kv_blocks": 28, "swap_space": 0.01, "preemption_mode": "swap"},
    {"enable_prefix_caching": False, "max_steps_in_flight": 3},
], ids=lambda options: "-".join(options) or "default")
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_tokens_logprobs_and_bits_are_those_without_drafts(target: Path, plain: Any, kind: str,
                                                           options: dict[str, Any]) -> None:
    bits, found, metrics = run(target, **options, **eagle(target / kind))
    assert found == plain[1]
    assert bits == plain[0]
    assert metrics["spec_draft_tokens"] > metrics["spec_accepted_tokens"] > (8 if kind == "eagle" else 0)


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "int4"])
def test_a_head_that_is_stored_as_integers_computes_in_four_bits_on_a_cpu(tmp_path: Path, stored: str) -> None:
    """Its own 8 bits too, and whatever the target does: a draft costs what it reads."""
    make_checkpoint(tmp_path, "llama", hidden_size=64, intermediate_size=96, num_attention_heads=8)
    folder = make_head(tmp_path / "head", tmp_path, "eagle")
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    if stored != "bfloat16":
        rounded_config, to_codes = (ROUNDED_CONFIG, rounded) if stored == "int8" else (PACKED_CONFIG, packed)
        save_file(to_codes(weights), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": rounded_config}))
    target = decoder_of(None, str(tmp_path), 64, 1)
    source = resolve_model(str(folder))
    head = build_head(source.config, source.weights(None), target, 64)
    wanted = target.layers[0].attn.qkv.packed.format if stored == "bfloat16" else "int4"
    assert [each.packed.format for each in (head.attn.qkv, head.mlp.up, head.mlp.down, head.fuse)] == [wanted] * 4
    assert "int" not in target.layers[0].attn.qkv.packed.format


def drafts_of(llm: LLM, parents: bool = False) -> dict[tuple[int, ...], tuple[Any, ...]]:
    """Fills up while the engine runs: what was proposed after each text; with `parents` tokens and their parents."""
    worker = llm._core.executor._worker  # type: ignore[attr-defined]
    drafter, table = worker._runner.drafter, worker._table
    propose, seen = drafter.propose, {}

    def recording(entries: Sequence[PlanEntry]) -> Any:
        filled, guesses = propose(entries)
        for entry in filled:
            if entry.drafts:
                text = tuple(table.tokens[entry.row, : entry.start + 1].tolist())
                found = (tuple(entry.drafts), tuple(entry.parents)) if parents else entry.drafts
                before = seen.setdefault(text, found)
                # Those that are drawn depend on whose noise it is.
                greedy = table.sampling(entry.row).params.greedy
                assert not greedy or before == found, "two proposals for one text differ"
        return filled, guesses

    drafter.propose = recording
    return seen


@pytest.mark.parametrize("options", [
    {"block_size": 8},
    {"block_size": 4, "num_kv_blocks": 40, "swap_space": 0.01, "preemption_mode": "swap", "max_num_batched_tokens": 9},
    {"block_size": 4, "num_kv_blocks": 32},
], ids=["default", "swap-and-chunks", "preemption"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_drafts_and_acceptance_are_those_of_the_reference(target: Path, kind: str, options: dict[str, Any]) -> None:
    """Whatever was cached, cut into chunks, shared, preempted or swapped: a draft depends on the text alone."""
    prompts = [prompt[:30] for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, **options, **eagle(target / kind)) as llm:
        seen = drafts_of(llm)
        # The second time the prompts, and what was said after them, come from the cache.
        texts = [p + list(o.outputs[0].token_ids) for p, o in
                 zip(prompts, llm.generate(prompts, [greedy] * len(prompts), use_tqdm=False), strict=True)]
        again = [text[:-9] for text in texts]
        llm.generate(again, [greedy] * len(again), use_tqdm=False)
        llm.check()
        metrics = llm.metrics()
    torch.set_num_threads(1)
    head = PlainHead(target / kind, target)
    features = [head.features(target_states(target, text)) for text in texts]
    checked = right = 0
    for text, drafts in seen.items():
        for whole, known in zip(texts, features, strict=True):
            if tuple(whole[: len(text)]) == text:
                assert list(drafts) == head.drafts(text, known, len(drafts))
                hits = [a == b for a, b in zip(drafts, whole[len(text) :], strict=False)]
                right += hits.index(False) if False in hits else len(hits)
                checked += 1
                break
    assert checked > 60
    assert metrics["spec_accepted_tokens"] > 0
    if kind == "eagle":
        assert right > 3


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trees_of_a_head(target: Path, plain: Any, kind: str) -> None:
    """Tokens and bits are those without drafts, and what follows a branch that was kept is drafted from its states."""
    tree = {"width": 3, "depth": 4, "nodes": 12}
    bits, found, metrics = run(target, block_size=4, num_kv_blocks=40, **eagle(target / kind, tree=tree))
    assert found == plain[1]
    assert bits == plain[0]
    assert metrics["spec_draft_tokens_at_1"] > metrics["spec_verifications"]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)
    options = eagle(target / kind, tree=tree)
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, block_size=4, **options) as llm:
        seen, moved = drafts_of(llm, parents=True), moves_counted(llm)
        texts = [p + list(o.outputs[0].token_ids) for p, o in
                 zip(PROMPTS, llm.generate(PROMPTS, [greedy] * len(PROMPTS), use_tqdm=False), strict=True)]
    assert sum(moved) > (5 if kind == "eagle" else 0)
    head = PlainHead(target / kind, target)
    features = [head.features(target_states(target, text)) for text in texts]
    checked = 0
    for text, (drafts, parents) in seen.items():
        whole = next(i for i, each in enumerate(texts) if tuple(each[: len(text)]) == text)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(drafts, parents or range(-1, len(drafts) - 1), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert paths[0] == tuple(head.drafts(text, features[whole], 1))
        if len(texts[whole]) - len(text) > tree["nodes"]:  # near the end trees are smaller
            assert set(paths) == set(head.tree(text, features[whole], **tree))
            checked += 1
    assert len(seen) > 60 and checked > 30


def test_hidden_states_come_out_of_recorded_steps(target: Path) -> None:
    """Whoever watches the layers does not cost a small step its recording; the tests above say that the states are
    right."""
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, **eagle(target / "eagle3")) as llm:
        llm.generate(PROMPTS[:2], [params(i) for i in range(2)], use_tqdm=False)
        recorder = llm._core.executor._worker._runner._passes.recorder  # type: ignore[attr-defined]
    assert recorder.replayed > 20 and not recorder.refused


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_chain_ends_where_the_head_is_unsure(target: Path, kind: str, together: int) -> None:
    """By the reference's own probabilities; for one stream and for several, whose chains are of different lengths. The
    tokens are those without drafts, and the passes of the head are recorded."""
    prompts, floor = [prompt[:20] for prompt in PROMPTS[:3]], 4e-4
    greedy = [SamplingParams(temperature=0.0, max_tokens=24 + i, ignore_eos=True) for i in range(3)]
    options = eagle(target / kind, min_draft_probability=floor)
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, block_size=4) as llm:
        wanted = [one.outputs[0].token_ids for one in llm.generate(prompts, greedy, use_tqdm=False)]
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1, block_size=4, **options) as llm:
        seen, found = drafts_of(llm), []
        for at in range(0, 3, together):
            found += llm.generate(prompts[at : at + together], greedy[at : at + together], use_tqdm=False)
        recorder = llm._core.executor._worker._runner.drafter.model._recorder  # type: ignore[attr-defined]
    assert [one.outputs[0].token_ids for one in found] == wanted
    assert recorder.replayed > 20 and not recorder.refused
    head, lengths = PlainHead(target / kind, target), set()
    texts = [p + list(tokens) for p, tokens in zip(prompts, wanted, strict=True)]
    features = [head.features(target_states(target, text)) for text in texts]
    for text, drafts in seen.items():
        whole, known = next((each, states) for each, states in zip(texts, features, strict=True)
                            if tuple(each[: len(text)]) == text)
        full, chances = head.chain(text, known, K)
        left = len(whole) - len(text) - 1
        sure = next((i for i, chance in enumerate(chances) if chance < floor), K)
        if all(abs(chance / floor - 1.0) > 1e-3 for chance in chances):
            assert list(drafts) == full[: min(sure, left)]
            lengths.add(len(drafts))
    assert len(lengths) > 1


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_drafts_that_are_drawn_in_one_call_are_those_of_the_sampler(
    target: Path, monkeypatch: pytest.MonkeyPatch, kind: str, together: int
) -> None:
    """Beside greedy sequences, and ones whose logits are changed, so that all have to wait for each other."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.7}, {"temperature": 0.9, "top_p": 0.8}, {"temperature": 0.8, "top_k": 12, "min_p": 0.02},
        {"temperature": 0.0}, {"temperature": 0.7, "repetition_penalty": 1.1}, {"temperature": 0.3, "top_k": 20}]
    asked = [SamplingParams(max_tokens=30, ignore_eos=True, seed=i, **settings[i % 6]) for i in range(6)]

    def drafts() -> tuple[list[Any], dict[tuple[int, ...], tuple[int, ...]], int]:
        with LLM(str(target), skip_tokenizer_init=True, num_threads=1, max_num_seqs=together,
                 **eagle(target / kind)) as llm:
            drafter, seen = llm._core.executor._worker._runner.drafter, {}  # type: ignore[attr-defined]
            propose, chains, calls = drafter.propose, drafter.model.chains, []

            def recording(entries: Sequence[PlanEntry]) -> Any:
                filled, weights = propose(entries)
                for entry in filled:
                    if entry.drafts:
                        text = drafter._table.tokens[entry.row, : entry.start + 1].tolist()
                        seen[entry.row, *text] = entry.drafts
                return filled, weights

            drafter.propose = recording
            drafter.model.chains = lambda *given: calls.append(given) or chains(*given)
            found = llm.generate(PROMPTS[:6], asked, use_tqdm=False)
            return [one.outputs[0].token_ids for one in found], seen, len(calls)

    said, drawn, calls = drafts()
    monkeypatch.setattr(Drafter, "_plain_draws", lambda *_: None)
    assert drafts() == (said, drawn, 0)
    assert calls > 10 and len(drawn) > 60


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_siblings_draft_from_their_common_prompt(target: Path, kind: str) -> None:
    """n > 1: tokens are the same, and each sibling's drafts are those of its own text."""
    many = SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True, seed=4, n=3)
    outputs = []
    for more in ({}, eagle(target / kind)):
        with LLM(str(target), skip_tokenizer_init=True, num_threads=1, block_size=4, **more) as llm:
            seen = drafts_of(llm) if more else {}
            found = llm.generate([PROMPTS[3][:22]], many, use_tqdm=False)[0]
            outputs.append([one.token_ids for one in found.outputs])
    assert outputs[0] == outputs[1]
    assert len(seen) > 20


@pytest.mark.parametrize("kind, more", [
    ("skip_layers", {}), ("eagle", {}), ("eagle", {"tree": {"width": 3}}), ("eagle", {"verifier": "rejection"}),
    ("eagle", {"adaptive": True}),
    ("eagle", {"ranks": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2,
                         "distributed_executor_backend": "threads"}}),
], ids=lambda case: case if isinstance(case, str) else "-".join(case) or "chain")
def test_lookups_serve_sequences_under_a_grammar(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    """A grammar's masks must know the drafts. The others beside them have those of the model in the same steps."""
    pytest.importorskip("xgrammar")
    config = {**SMALL, "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "eos_token_id": 0,
              "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    write_head(tmp_path / "head", config, "eagle")
    ruled = {"structured_outputs": {"regex": "(ab|ba){30}c"}}
    wanted = [SamplingParams(seed=i, temperature=0.7 * (i % 2), max_tokens=30, ignore_eos=True,
                             **(ruled if i < 4 else {})) for i in range(8)]
    model = {"model": str(tmp_path / "head")} if kind == "eagle" else {"skipped_layers": [1]}
    method = {"method": kind, "adaptive": False, **model, **{k: v for k, v in more.items() if k != "ranks"}}
    options = {"load_format": "dummy", "seed": 3, "num_threads": 1, "block_size": 4}
    found = []
    for asked in ({}, {"speculative_config": method, **more.get("ranks", {})}):
        with LLM(str(tmp_path), **options, **asked) as llm:
            outputs = llm.generate([[3 + i, 4, 5] for i in range(8)], wanted, use_tqdm=False)
            llm.check()
            assert llm.metrics()["kv_blocks_used"] == 0
        found.append([one.outputs[0].token_ids for one in outputs])
    drafted = [one.metrics.counts.draft_tokens for one in outputs]
    if more.get("verifier") != "rejection":
        assert found[0] == found[1]
    assert found[0][::2] == found[1][::2]  # greedy
    if not more.get("adaptive"):
        assert min(drafted) > 0
        assert outputs[0].metrics.counts.accepted_tokens > 0


def test_rejection_gives_a_sequence_of_the_asked_length(target: Path) -> None:
    with LLM(str(target), skip_tokenizer_init=True, num_threads=1,
             **eagle(target / "eagle", verifier="rejection")) as llm:
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)
        assert llm.metrics()["spec_accepted_tokens"] > 20


def test_embeddings_of_the_target_are_not_kept_twice(target: Path, tmp_path: Path) -> None:
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    for changed in (False, True):
        folder = make_head(tmp_path / str(changed), target, "eagle")
        weights = load_file(folder / "model.safetensors")
        save_file(weights | {"embed_tokens.weight": theirs + changed}, folder / "model.safetensors")
        with LLM(str(target), skip_tokenizer_init=True, num_threads=1, **eagle(folder)) as llm:
            worker = llm._core.executor._worker  # type: ignore[attr-defined]
            head = worker._runner.drafter.model._head
            assert (head.embed is not head._target.embed) == changed


def respelled(config: dict[str, Any], spelling: str) -> dict[str, Any]:
    """The config of an EAGLE-3 head as others write it."""
    if spelling == "authors":  # all versions are called so
        return config | {"architectures": ["LlamaForCausalLM"]}
    own = ("draft_vocab_size", "eagle_config")
    layer = {name: value for name, value in config.items() if name not in own} | {"architectures": ["LlamaForCausalLM"]}
    return {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": False,
            "draft_vocab_size": config["draft_vocab_size"], "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": config["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
            "transformer_layer_config": layer}


@pytest.mark.parametrize("spelling", ["authors", "speculators"])
def test_an_eagle3_head_drafts_the_same_however_its_config_is_written(target: Path, tmp_path: Path,
                                                                      spelling: str) -> None:
    folder = make_head(tmp_path / "head", target, "eagle3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(respelled(config, spelling)))
    if spelling == "speculators":
        weights = {name.replace("midlayer.", "layers.0."): part
                   for name, part in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors")
    drafted = []
    for head in (target / "eagle3", folder):
        with LLM(str(target), skip_tokenizer_init=True, num_threads=1, **eagle(head)) as llm:
            drafted.append(drafts_of(llm))
            llm.generate(PROMPTS[:2], [params(0, max_tokens=12)] * 2, use_tqdm=False)
    assert drafted[0] == drafted[1] and len(drafted[0]) > 10


@pytest.mark.parametrize("said, read", [
    ([2, 4, 5], (1, 3, 4)),  # what layers take in: what the ones before them put out
    ([1, 3, 4], (1, 3, 4)),  # what layers put out
    ([1, 4, 8], (0, 3, 7)),  # layer 8 of 8 takes nothing in: all are what layers take in
    ([0, 1], (None, 0)),
    (None, (1, 3, 4)),
])
def test_layers_are_numbered_by_what_they_take_in_or_by_what_they_put_out(said: Any, read: tuple[int | None, ...]
                                                                          ) -> None:
    config = {**SMALL, "num_hidden_layers": 8}
    wanted = read_spec({**config, "architectures": ["LlamaForCausalLM"]})
    head = {**config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    found = read_head(head | {"eagle_aux_hidden_state_layer_ids": said}, wanted).states
    assert found == tuple("embed" if layer is None else f"layers.{layer}" for layer in read)


@pytest.mark.parametrize("changed, said", [
    ({"norm_before_fc": True}, "norm_before_fc=True"),
    ({"eagle_config": [1, 2]}, "eagle_config must be a mapping"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config use_aux_hidden_state=False"),
    ({"eagle_config": {"use_last_layernorm": False}}, "eagle_config use_last_layernorm=False"),
    ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config parallel_draft_step=4"),
    ({"architectures": ["Eagle3Speculator"]}, "norm_before_residual is missing"),
    ({"architectures": ["Eagle3Speculator"], "norm_before_residual": True}, "transformer_layer_config is missing"),
    ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle"}, "speculators_model_type='eagle'"),
])
def test_fields_of_eagle3_that_are_not_known_are_refused_by_name(changed: dict[str, Any], said: str) -> None:
    spec = read_spec({**SMALL, "architectures": ["LlamaForCausalLM"]})
    head = {**SMALL, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    with pytest.raises(ModelLoadError, match=said):
        read_head(head | changed, spec)


@pytest.mark.parametrize("fault, said", [
    ("no model", "no head comes with Quire for this model"),
    ("absent", "there is no model"),
    ("hidden_size", "hidden_size is 64 and the target's 48"),
    ("vocab_size", "vocab_size is 98"),
    ("architectures", "no kind of EAGLE head"),
    ("tensor", "fc.weight"),
    ("extra", "input_layernorm"),
    ("d2t", "d2t"),
])
def test_what_is_wrong_with_a_head_is_said_of_it(target: Path, tmp_path: Path, fault: str, said: str) -> None:
    folder = make_head(tmp_path / "head", target, "eagle3" if fault == "d2t" else "eagle")
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    config |= {"hidden_size": {"hidden_size": 64}, "vocab_size": {"vocab_size": 98},
               "architectures": {"architectures": ["NobodyForCausalLM"]}}.get(fault, {})
    if fault == "tensor":
        del weights["fc.weight"]
    elif fault == "extra":
        weights["layers.0.input_layernorm.weight"] = torch.ones(48)
    elif fault == "d2t":
        weights["d2t"] = weights["d2t"] + 60
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    asked = {"method": "eagle"} | ({} if fault == "no model" else {"model": str(folder)})
    asked |= {"model": str(tmp_path / "nowhere")} if fault == "absent" else {}
    with pytest.raises(ConfigError, match=f"(?s)^speculative_config .*{said}"):
        LLM(str(target), skip_tokenizer_init=True, num_threads=1, speculative_config=asked)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_ranks_draft_what_one_rank_drafts(target: Path, plain: Any, kind: str) -> None:
    """Tokens and log-probabilities are those without drafts, as many drafts are right as on one rank, and the same
    memory holds as many blocks: one rank keeps the head's KV."""
    options = {"kv_cache_memory": "2MiB", **eagle(target / kind)}
    alone = run(target, **options)[2]
    _, found, metrics = run(target, tensor_parallel_size=2, pipeline_parallel_size=2,
                            distributed_executor_backend="threads", **options)
    assert found == plain[1]
    for name in ("spec_draft_tokens", "spec_accepted_tokens", "kv_blocks_total"):
        assert metrics[name] == alone[name]


@pytest.mark.parametrize("field, value", [("kv_cache_dtype", "int8")])
def test_what_heads_do_not_run_with_yet_is_refused_by_name(target: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as error:
        LLM(str(target), skip_tokenizer_init=True, num_threads=1, **{field: value}, **eagle(target / "eagle"))
    assert error.value.field == field


def test_heads_may_draft_over_stages_of_gpus_and_other_models_may_not() -> None:
    options: dict[str, Any] = {"model": "m", "device": "cuda", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    heads: list[dict[str, Any]] = [{"method": "eagle", "model": "head"}, {"method": "mtp"}]
    for asked in heads:
        check_parallel(EngineConfig.create(**options, speculative_config=asked))
    with pytest.raises(ConfigError, match="'skip_layers' are not made on GPUs of several stages") as error:
        check_parallel(EngineConfig.create(**options, speculative_config={"method": "skip_layers"}))
    assert error.value.field == "speculative_config"
