"""Decode steps with the shapes of 8B, where kernels of many kinds are on the chip at once: launched early, each begins
on multiprocessors that others have not left."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def tokens_of(count: int, fuse_rope: bool) -> list[list[int]]:
    """Of so many sequences, by twelve layers of 8B's shapes, deterministic."""
    from quire.bench.gpu.cases import MODELS
    from quire.bench.gpu.engine import build_core, build_worker, front_door
    from quire.sampling.params import SamplingParams
    from quire.worker.gpu.options import DeviceOptions

    config: dict[str, Any] = {**MODELS["8b"], "num_hidden_layers": 12}
    options = DeviceOptions(max_num_seqs=count, max_num_batched_tokens=16384, deterministic=True, fuse_rope=fuse_rope)
    worker = build_worker(config, options, num_kv_blocks=72 * count)
    llm = front_door(build_core(worker, options), worker)
    prompts = [[(7919 * seq + 31 * place) % 150000 for place in range(1024)] for seq in range(count)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True), use_tqdm=False)
    llm.close()
    assert [output.error for output in outputs if output.error] == []
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("count", [32, 128])
def test_rotation_inside_deterministic_attention_changes_no_token_of_steps_with_8b_shapes(count: int) -> None:
    """At 32 sequences a barrier's state once came over numbers that its place was given to: a third of them ended with
    numbers that were not finite, in every run."""
    assert tokens_of(count, True) == tokens_of(count, False)
