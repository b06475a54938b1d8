"""Mixed steps in fixed shapes: how they are laid out, and that their tokens are those of the plain worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.types import HeadShape
from quire.parallel.place import Place
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import PlanEntry
from quire.scheduler.request import Request
from quire.worker.gpu import padded
from quire.worker.gpu.batches import LogitRows, MixedBatch
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.padded import MixedRung, MixedRungs
from tests.kernels.triton.interpreter import prepare
from tests.worker.gpu import engines


def step(singles: int, prompts: list[int]) -> list[PlanEntry]:
    """Prompts at their second chunk, between sequences that compute one token."""
    alone = [PlanEntry(row, 7 + row, 1, sample=True) for row in range(singles)]
    longer = [PlanEntry(singles + i, 5, count, sample=i % 2 == 0) for i, count in enumerate(prompts)]
    return [*longer[:1], *alone, *longer[1:]]


def shapes(max_num_seqs: int = 40, max_tokens: int = 300) -> MixedRungs:
    return MixedRungs(max_num_seqs, max_tokens, 10, False)


def fitting(singles: int, prompts: list[int], rungs: MixedRungs) -> MixedRung | None:
    batch = MixedBatch.of(step(singles, prompts))
    return rungs.fitting(batch, singles + len(prompts))


def test_the_smallest_shape_that_holds_a_step_is_taken() -> None:
    rungs = shapes()
    assert {rung.decodes for rung in rungs.all} == {8, 32, 128}
    assert {rung.tokens for rung in rungs.all} == {64, 128, 256, 384}
    assert fitting(3, [30], rungs) == MixedRung(64, 8)
    assert fitting(9, [64, 1000 // 16], rungs) == MixedRung(128, 32)
    assert fitting(0, [300], rungs) == MixedRung(384, 8)
    assert fitting(129, [5], rungs) is None and fitting(1, [600], rungs) is None
    assert fitting(1, [3] * (padded.PROMPTS + 1), rungs) is None


def test_a_step_is_laid_out_around_its_padding() -> None:
    pytest.importorskip("triton")
    prepare()
    entries = step(2, [4, 3])
    batch = MixedBatch.of(entries)
    reads = LogitRows.of(entries, batch)
    rungs, rung = shapes(), MixedRung(64, 8)
    stage = rungs.filled(rung, batch, reads, entries, slot=5)
    sent = stage.send(torch.device("cpu"))

    def view(name: str) -> list[int]:
        return stage.view(sent, name).tolist()

    empty = rungs.empty(rung)
    assert stage._spans == empty._spans and stage.size == empty.size
    assert view("ring") == [5]
    assert view("token_rows") == [0, 1, *[-1] * 6, 2, 2, 2, 2, 3, 3, 3, *[-1] * 57]
    assert view("positions")[:15] == [7, 8, *[0] * 6, 5, 6, 7, 8, 5, 6, 7]
    assert view("query_start") == [*range(8), 8, 12, *[15] * 7]
    assert view("lengths")[:10] == [8, 9, *[0] * 6, 9, 8] and view("rows")[:10] == [0, 1, *[-1] * 6, 2, 3]
    assert view("last")[:3] == [0, 1, 11] and view("draw_rows") == [0, 1, 2, *[-1] * 13]
    assert view("draw_positions")[:3] == [8, 9, 9]
    assert view("tile_seq") == [8, 9, *[-1] * 13] and set(view("tile_first")) == {0}


def test_tiles_hold_the_decoding_sequences_too_where_one_kernel_attends_for_all() -> None:
    pytest.importorskip("triton")
    prepare()
    entries = step(2, [25])
    batch = MixedBatch.of(entries)
    rungs, rung = MixedRungs(40, 300, 10, True), MixedRung(64, 8)
    stage = rungs.filled(rung, batch, LogitRows.of(entries, batch), entries, 0)
    sent = stage.send(torch.device("cpu"))
    found = stage.view(sent, "tile_seq").numpy()
    assert found[:5].tolist() == [0, 1, 8, 8, 8] and np.all(found[5:] == -1)
    assert stage.view(sent, "tile_first")[:5].tolist() == [0, 0, 20, 10, 0]


LATENT = {
    **engines.QWEN3, "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 1, "kv_lora_rank": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0,
}  # fmt: skip


def requests() -> list[Request]:
    """Prompts that come in chunks beside sequences that decode; several samples of one prompt, and special ones."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 0.7, "top_k": 5, "logprobs": 2}, {"n": 2}]
    return [
        Request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(count)],
                SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, **kinds[i % 4]}), i, 0.0)
        for i, count in enumerate((3, 11, 4, 9))
    ]  # fmt: skip


def tokens_of(core: Any) -> dict[str, Any]:
    mine = requests()
    engines.run(core, mine)
    core.close()
    return {r.request_id: [(seq.tokens, seq.error) for seq in r.sequences] for r in mine}


@pytest.mark.parametrize(
    ("config", "deterministic"),
    [({**engines.QWEN3, "num_hidden_layers": 1}, False), ({**engines.QWEN3, "num_hidden_layers": 1}, True),
     (engines.GEMMA3, False), (LATENT, False)],
    ids=["plain", "deterministic", "windows", "latents"],
)  # fmt: skip
def test_padded_steps_give_the_plain_workers_tokens(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], deterministic: bool
) -> None:
    pytest.importorskip("triton")
    prepare()
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.ops.triton import TritonOps

    monkeypatch.setattr(padded, "PROMPT_TOKENS", (4, 8))
    monkeypatch.setattr(padded, "DECODES", (2, 8))
    taken: list[MixedRung] = []
    launch = padded.PaddedSteps._run
    monkeypatch.setattr(padded.PaddedSteps, "_run", lambda self, rung: (taken.append(rung), launch(self, rung))[1])
    config = {**config, "vocab_size": 61}
    options = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=engines.SEQS, max_num_batched_tokens=7,
                            max_model_len=engines.MAX_LEN, pad_mixed=True)
    ops = TritonOps("cpu", torch.float32, deterministic=deterministic)
    core = engines.make_engine(config, device=True, depth=2, budget=7, options=options, ops=ops)
    assert tokens_of(core) == tokens_of(engines.make_engine(config, device=False, budget=7))
    assert {rung.decodes for rung in taken} == {2, 8} and {rung.tokens for rung in taken} == {4, 8}


@pytest.mark.parametrize(
    ("hidden", "qkv", "attended", "inner", "most"),
    [(1024, 4096, 2048, 3072, 2048), (4096, 6144, 4096, 12288, 640), (5120, 7168, 5120, 17408, 384)],
)
def test_prompts_are_padded_only_as_far_as_the_host_is_slower_than_the_gpu(
    hidden: int, qkv: int, attended: int, inner: int, most: int
) -> None:
    """Layers of 0.6B, 8B and 14B."""

    shapes = {"layers.0.attn.qkv.weight": (qkv, hidden), "layers.0.attn.o.weight": (hidden, attended),
              "layers.0.mlp.up.weight": (2 * inner, hidden), "layers.0.mlp.down.weight": (hidden, inner)}
    attn = SimpleNamespace(shape=HeadShape(8, 2, 64))
    decoder: Any = SimpleNamespace(layers=[SimpleNamespace(attn=attn)], spec=SimpleNamespace(parameters=lambda: shapes),
                                   shard=SimpleNamespace(place=Place()))
    attention = SimpleNamespace(tokens_per_tile=lambda shape: 32, deterministic=False)
    rungs = MixedRungs.of(attention, decoder, 256, 16384)
    assert rungs is not None and max(rung.tokens for rung in rungs.all) == most
    assert MixedRungs.of(None, decoder, 256, 16384) is None and MixedRungs.of(attention, decoder, 256, 0) is None
