"""Memory of a GPU that several ranks share. Run it alone: others' use would show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import SamplingParams
from tests.gpu.test_ranks import PROMPTS, SMALL, checkpoint, engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_ranks_on_one_gpu_share_its_memory(tmp_path: Path) -> None:
    """The pool is sized from what is left for all of them; the engine starts and answers."""
    checkpoint(tmp_path, "llama")
    sizes = {**SMALL, "num_kv_blocks": None, "gpu_memory_utilization": 0.4}
    with engine(tmp_path, dtype="bfloat16", tensor_parallel_size=2, **sizes) as llm:
        free, total = torch.cuda.mem_get_info()
        assert 0.3 * total < total - free < 0.45 * total
        assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
