"""What a step launches on a GPU, in order: a change of the forward pass that costs a launch or a copy shows here.

Layers have the shapes of Qwen3-0.6B, because the GEMM table chooses by shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.config import CacheConfig
from quire.kernels.decode_lengths import Lengths, lengths_of
from quire.models.build import build_decoder, dummy_weights
from quire.models.decoder import Decoder
from quire.models.heads.build import read_head
from quire.models.heads.head import DraftHead
from quire.scheduler.plan import PlanEntry
from quire.speculation.options import SpeculationOptions
from quire.worker.gpu import worker as worker_module
from quire.worker.gpu.contexts import StepContexts
from quire.worker.gpu.drafted import Drafted
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.runner import DeviceRunner
from quire.worker.gpu.speculation import Speculation
from quire.worker.gpu.worker import GpuWorker
from tests.worker.gpu import engines
from tests.worker.gpu.launches import names, recorded

pytest.importorskip("triton")
QWEN3 = {**engines.QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
GEMMA3 = {**engines.GEMMA3, "head_dim": 256, "layer_types": ["full_attention"] * 2}

ONE_ROW = ["row", "rope_decode", "row", "row", "row"]
"""Norm with q, k and v; rotation, KV write and attention; output with the residual; norm, gate and up; down."""
MORE_ROWS = ["linear", "rope_decode", "linear", "rms_norm", "linear", "act_mul", "linear"]
"""Each residual sum with the norm after it, which may be the next layer's."""
DRAFTS = ["linear", "rope_cache", "decode", "linear", "rms_norm", "linear", "act_mul", "linear"]
FIXED = ["fixed", "rope_cache", "mixed", "fixed", "tree", "rms_norm", "fixed", "act_mul", "fixed", "tree"]
"""Few rows share out the slices of the output projection and of the MLP's second GEMM."""
SANDWICH = ["rms_norm", "linear", "rope_cache", "decode", "linear", "rms_norm", "add",
            "rms_norm", "linear", "act_mul", "linear", "rms_norm", "add"]  # fmt: skip


def eagle3(target: Decoder, device: torch.device, max_model_len: int) -> DraftHead:
    """A head that reads the states of three layers."""
    shapes = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"],
              "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # fmt: skip
    spec = read_head({**QWEN3, **shapes}, target.spec)
    head = DraftHead(spec, target, max_model_len)
    head.load({name: torch.zeros(size, dtype=torch.bfloat16) for name, size in spec.parameters().items()}, None)
    return head


def worker_of(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], deterministic: bool = False, head: bool = False
) -> GpuWorker:
    """As it is on a GPU in bfloat16, on tensors of the CPU."""
    if torch.cuda.is_available():
        pytest.skip("the recorder stands in for Triton's interpreter")
    from quire.ops.triton import TritonOps

    def build(config: Any, weights: Any, ops: Any, device: Any, dtype: torch.dtype, length: int, *_: Any) -> Any:
        return build_decoder(config, weights, ops, max_model_len=length, dtype=dtype)

    monkeypatch.setattr(worker_module, "build_on_device", build)
    options = DeviceOptions(device="cpu", dtype="bfloat16", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64,
                            pad_mixed=False)  # fmt: skip
    ops = TritonOps("cpu", torch.bfloat16, deterministic=deterministic)
    cache = CacheConfig(block_size=8, num_kv_blocks=16)
    asked = Speculation(SpeculationOptions.parse({"method": "eagle", "model": "given"}), head=eagle3) if head else None
    return GpuWorker(config, dummy_weights(config), cache, options, ops=ops, speculation=asked)


def decode(
    worker: GpuWorker, rows: int, separate_rope: bool = False, lengths: Lengths = Lengths.MIDDLE, rests: bool = False
) -> tuple[list[str], list[str]]:
    """(kernels and operations, allocations) from the embedding to the logits."""
    launches = worker._runner.launches

    def gather(*args: Any) -> None:
        for part in (args[5], args[6], *args[7]):
            part.zero_()

    launches._kernels = replace(launches._kernels, gather_inputs=gather, draw=lambda *_: found.append("draw"))
    with torch.inference_mode(), recorded() as found:
        launches.decode(rows, separate_rope, lengths, rests)
    first = next(i for i, entry in enumerate(found) if entry.startswith("embedding"))
    found = found[first : found.index("draw")]
    return names(found), [entry for entry in found if entry.startswith(("empty", "new_empty"))]


def test_a_row_alone_takes_five_launches_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, allocated = decode(worker_of(monkeypatch, QWEN3), 1)
    assert launched == ["embedding", *ONE_ROW, *ONE_ROW, "row"]
    assert len(allocated) == 2 * 5


def test_two_rows_are_fused_in_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, _ = decode(worker_of(monkeypatch, QWEN3), 2)
    few = ["vector", "rope_decode", "vector", "vector", "vector"]
    assert launched == ["embedding", *few, *few, "vector"]


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_step_of_a_head_that_rests_launches_nothing_for_it(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    plain = decode(worker_of(monkeypatch, QWEN3), rows)
    worker = worker_of(monkeypatch, QWEN3, head=True)
    assert rows in worker._runner.resting_rungs
    assert decode(worker, rows, rests=True) == plain


@pytest.mark.parametrize(("rows", "more"), [(1, []), (2, []), (4, ["sum"])])
def test_what_a_head_reads_takes_one_launch_more_and_a_sum_where_the_stream_owes_one(
    monkeypatch: pytest.MonkeyPatch, rows: int, more: list[str]
) -> None:
    """What the fused kernels of few rows leave in memory is what is kept: no layer's launches are others."""
    from quire.kernels.triton import features

    launched, _ = decode(worker_of(monkeypatch, QWEN3), rows)
    worker = worker_of(monkeypatch, QWEN3, head=True)
    worker.ops.pdl = True  # type: ignore[attr-defined]
    worker._states._kernels = replace(worker._states._kernels, features=features)
    fed, _ = decode(worker, rows)
    assert [name for name in fed if name not in ("keep_projected", "sum", "clone")] == launched
    assert [name for name in fed if name in ("keep_projected", "sum", "clone")] == [
        *(["clone"] if more else []), *more * 2, "keep_projected"]  # fmt: skip


@pytest.mark.parametrize(("separate_rope", "layer"), [(False, MORE_ROWS), (True, DRAFTS)])
def test_more_rows_make_each_sum_with_the_norm_after_it(
    monkeypatch: pytest.MonkeyPatch, separate_rope: bool, layer: list[str]
) -> None:
    launched, allocated = decode(worker_of(monkeypatch, QWEN3), 4, separate_rope)
    assert launched == ["embedding", "rms_norm", *layer, "rms_norm", *layer, "rms_norm", "mm"]
    assert len(allocated) == 2 * 4 + 1, "norms, gates and attention: GEMMs have memory of their own"


@pytest.mark.parametrize(("separate_rope", "fits"), [(True, True), (True, False), (False, True)])
def test_rows_with_drafts_rotate_inside_their_attention_where_its_kernel_can(
    monkeypatch: pytest.MonkeyPatch, separate_rope: bool, fits: bool
) -> None:
    """Which is told that they may read each other's keys; four rows without drafts are the other kernel's."""
    from quire.attention import triton as attention

    asked: list[bool] = []

    def attend(qkv: torch.Tensor, *_: Any, out: torch.Tensor, drafts: bool, **__: Any) -> None:
        asked.append(drafts)
        out.zero_()

    worker = worker_of(monkeypatch, QWEN3)
    monkeypatch.setattr(attention, "few_fits", lambda *_: fits)
    monkeypatch.setattr(attention, "few_decode_attention", attend)
    launched, _ = decode(worker, 4, separate_rope)
    fused = separate_rope and fits
    assert asked == ([True] * 2 if fused else [])
    assert launched.count("rope_cache") == (2 if separate_rope and not fits else 0)
    assert launched.count("rope_decode") == (0 if separate_rope else 2)


@pytest.mark.parametrize(
    ("rows", "beside", "few"), [(2, False, True), (4, False, False), (4, True, True), (8, True, True)])
def test_the_kernel_of_few_sequences_takes_up_to_eight_beside_gemms_of_few_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, beside: bool, few: bool
) -> None:
    from quire.attention import triton as attention

    asked: list[bool] = []

    def attend(qkv: torch.Tensor, *_: Any, out: torch.Tensor, drafts: bool, **__: Any) -> None:
        asked.append(drafts)
        out.zero_()

    worker = worker_of(monkeypatch, QWEN3)
    attends = worker._runner.contexts.attention
    assert isinstance(attends, attention.TritonAttention) and not attends.beside_few_gemm
    attends.beside_few_gemm = beside
    monkeypatch.setattr(attention, "few_fits", lambda *_: True)
    monkeypatch.setattr(attention, "few_decode_attention", attend)
    launched, _ = decode(worker, rows)
    assert (asked, launched.count("rope_decode")) == (([False] * 2, 0) if few else ([], 2))


@pytest.mark.parametrize(("short", "there", "made"), [(True, True, True), (True, True, False), (True, False, True),
                                                     (False, True, True)])  # fmt: skip
def test_few_sequences_decode_in_clusters_in_short_steps_where_the_kernel_can(
    monkeypatch: pytest.MonkeyPatch, short: bool, there: bool, made: bool
) -> None:
    from quire.attention import triton as attention

    asked: list[str] = []

    def attend(qkv: torch.Tensor, *_: Any, out: torch.Tensor, **more: Any) -> torch.Tensor | None:
        asked.append("few" if "drafts" in more else "clusters")
        out.zero_()
        return out if made else None

    worker = worker_of(monkeypatch, QWEN3)
    monkeypatch.setattr(attention, "few_fits", lambda *_: True)
    monkeypatch.setattr(attention, "few_decode_attention", attend)
    monkeypatch.setattr(attention.attention_cluster, "fits", lambda *_: there)
    monkeypatch.setattr(attention.attention_cluster, "cluster_decode_attention", attend)
    decode(worker, 2, lengths=Lengths.SHORT if short else Lengths.MIDDLE)
    layer = ["clusters"] if short and there else []
    assert asked == 2 * (layer if layer and made else [*layer, "few"])


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_with_many_keys_take_pieces_and_a_kernel_for_bandwidth(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    from quire.attention import triton as attention

    asked: list[tuple[int, int]] = []

    def attend(qkv: torch.Tensor, *given: Any, out: torch.Tensor, keys: int, **_: Any) -> None:
        asked.append((given[4].tasks - rows, keys))
        out.zero_()

    worker = worker_of(monkeypatch, QWEN3)
    runner, attends = worker._runner, worker._runner.contexts.attention
    assert isinstance(attends, attention.TritonAttention)
    attends._processors = 132
    runner.contexts.reserve(set(runner.rungs))
    monkeypatch.setattr(attention, "few_fits", lambda *_: True)
    monkeypatch.setattr(attention, "rope_decode_attention", attend)
    decode(worker, rows, lengths=Lengths.LONG)
    kv_heads = worker.spec.layers[0].attention.num_kv_heads
    assert asked == [(132 // kv_heads, 128)] * 2


def test_steps_are_short_up_to_so_many_keys_and_long_from_so_many_on() -> None:
    for lengths in ([1], [2048], [100, 3900]):
        assert lengths_of(lengths) is Lengths.SHORT
    for lengths in ([2049], [16383], [100, 4000], [16000, 300], [8000] * 8):
        assert lengths_of(lengths) is Lengths.MIDDLE
    for lengths in ([16384], [9000, 9000], [30_000] * 8):
        assert lengths_of(lengths) is Lengths.LONG


def test_narrow_models_have_launches_for_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.attention import triton as attention

    monkeypatch.setattr(attention.loading, "is_for", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(attention.attention_cluster, "knows", lambda dtype, shape, block: block == 8)
    contexts = worker_of(monkeypatch, QWEN3)._runner.contexts
    assert contexts.short_rungs([1, 2, 4, 8]) == [1, 2]
    contexts._hidden = 4096
    assert contexts.short_rungs([1, 2]) == []
    assert worker_of(monkeypatch, QWEN3, deterministic=True)._runner.contexts.short_rungs([1, 2]) == []


def test_few_rows_have_launches_for_many_keys_where_texts_can_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = worker_of(monkeypatch, QWEN3)._runner
    assert not runner.contexts.long_rungs(runner.rungs)  # of 64 tokens
    runner.contexts._max_model_len = 1 << 15
    assert runner.contexts.long_rungs([1, 2, 4, 8, 32]) == [1, 2, 4, 8]
    fixed = worker_of(monkeypatch, QWEN3, deterministic=True)._runner.contexts
    fixed._max_model_len = 1 << 15
    assert not fixed.long_rungs([1, 2])


@pytest.mark.parametrize("drafting", [False, True])
def test_a_step_is_launched_by_its_keys_but_not_of_a_draft_model(
    monkeypatch: pytest.MonkeyPatch, drafting: bool
) -> None:
    """Whose decode steps move on: a graph captured in passing would do so twice."""
    runner = worker_of(monkeypatch, QWEN3)._runner
    asked: list[tuple[int, bool, Lengths, bool]] = []
    monkeypatch.setattr(runner, "launch_decode", lambda *given: asked.append(given))
    monkeypatch.setattr(runner.draws, "draw", lambda step: None)
    monkeypatch.setattr(StepContexts, "long_rungs", lambda self, rungs: [1])
    runner._rungs_of = {Lengths.SHORT: [1], Lengths.LONG: [1]}
    if drafting:
        other = DeviceRunner(runner.launches.passes.decoder, worker_of(monkeypatch, QWEN3).ops, runner._table,
                             torch.device("cpu"), max_num_seqs=2, use_graphs=False, advance=True)
        assert other._rungs_of == {}
        return
    drafts = Drafted([0], [(0, 1)], torch.zeros(0))
    for start, drafted in ((20_000, None), (20_000, drafts), (4000, None), (40, None), (40, drafts)):
        runner.launch_staged([PlanEntry(0, start, 1, sample=True)], 0, drafted)
    assert [lengths for _, _, lengths, _ in asked] == [
        Lengths.LONG, Lengths.MIDDLE, Lengths.MIDDLE, Lengths.SHORT, Lengths.MIDDLE]


def test_deterministic_steps_are_not_fused_with_gemms_without_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (1, 4):
        launched, _ = decode(worker_of(monkeypatch, QWEN3, deterministic=True), rows)
        assert [name for name in launched if name != "copy"] == [
            "embedding", "rms_norm", *FIXED, "rms_norm", *FIXED, "rms_norm", "fixed"]  # fmt: skip


def test_norms_on_both_sides_run_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, _ = decode(worker_of(monkeypatch, GEMMA3), 4)
    assert launched == ["embedding", "mul", *SANDWICH, *SANDWICH, "rms_norm", "mm"]


MOE = {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8,
       "moe_intermediate_size": 64, "norm_topk_prob": True}  # fmt: skip
LATENT = {
    **QWEN3, "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 64, "first_k_dense_replace": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "experts"), [(4, ["few_up", "few_down"]), (8, ["count", "place", "expert", "expert", "sum"])]
)
def test_experts_are_routed_and_computed_without_a_look_at_the_choice(
    monkeypatch: pytest.MonkeyPatch, rows: int, experts: list[str]
) -> None:
    """Nothing waits for the device: no operation hands a number to the host."""
    launched, _ = decode(worker_of(monkeypatch, MOE), rows)
    layer = ["linear", "rope_decode", "linear", "rms_norm", "linear", "choose", *experts]
    assert launched == ["embedding", "rms_norm", *layer, "rms_norm", *layer, "rms_norm", "mm"]


def test_the_experts_of_one_row_add_the_residual_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, _ = decode(worker_of(monkeypatch, MOE), 1)
    assert launched.count("few_down") == 2 and "add" not in launched


def test_latent_attention_decodes_by_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, _ = decode(worker_of(monkeypatch, LATENT), 4)
    for layer in (launched[: len(launched) // 2], launched[len(launched) // 2 :]):
        assert [name for name in layer if name in ("bmm", "decode", "mixed", "tile", "rope_cache")] == [
            "bmm", "decode", "bmm"]  # fmt: skip
    assert "local_scalar_dense" not in launched
