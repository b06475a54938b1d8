"""Training a head on a real GPU: its kernels against those of the CPU, and a head that learns."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.models.loader.source import resolve_model
    from quire.training.chains import chain_attention
    from quire.training.eagle import Trainer
    from quire.training.lockstep import Lockstep
    from quire.training.options import TrainingOptions
    from quire.training.rows import Rows
    from quire.training.target import Target
    from quire.training.texts import Texts
    from tests.checkpoints import make_checkpoint
    from tests.kernels.triton.test_distill import check_distilled
    from tests.training.test_lockstep import spoken


@pytest.mark.parametrize("j", [0, 1, 3])
def test_chains_attend_as_on_a_cpu(j: int) -> None:
    generator = torch.Generator().manual_seed(j)
    parts = [torch.randn(2, 3, 192, 64, generator=generator).bfloat16() for _ in range(2 * j + 4)]
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        q, weight, *rest = (part.to(device, dtype).requires_grad_() for part in parts)
        mixed = chain_attention(q, list(zip(rest[::2], rest[1::2], strict=True)))
        found.append([mixed, *torch.autograd.grad((mixed * weight).sum(), [q, *rest])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.float().cpu(), other, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_that_of_torch(dtype: torch.dtype) -> None:
    check_distilled("cuda", dtype, 12288)


@pytest.mark.parametrize("start", ["random", "target"])
def test_a_head_learns(tmp_path: Path, start: str) -> None:
    make_checkpoint(tmp_path, "llama", head_dim=16)
    draw = random.Random(0)
    texts = Texts.of([([draw.randrange(3, 97) for _ in range(3)], [(7 * i + n) % 90 + 3 for i in range(40)])
                      for n in range(60)])
    options = TrainingOptions(steps=60, batch_tokens=1280, max_length=64, depth=3, draft_vocab=80, intermediate=80,
                              learning_rate=5e-3, eval_every=1000, save_every=1000, start=start)
    trainer = Trainer(Target(resolve_model(str(tmp_path)), "cuda"), texts, options)
    before = trainer.evaluate()
    said: list[str] = []
    after = trainer.train(tmp_path, said.append)
    assert after.loss < before.loss
    assert "steps/s" in said[-1]


@pytest.mark.parametrize("count", [3, 64])
def test_answers_in_lockstep_are_what_the_target_would_say(tmp_path: Path, count: int) -> None:
    make_checkpoint(tmp_path, "llama", head_dim=16)
    draw = random.Random(1)
    target = Target(resolve_model(str(tmp_path)), "cuda")
    jobs = [(i, [draw.randrange(3, 97) for _ in range(1 + 7 * i % 40)], 0.0, 20 + i % 60) for i in range(150)]
    found = spoken(Lockstep(Rows(target, count, 128, 0), ()), jobs)
    same = total = 0
    for i, prompt, _, most in jobs:
        assert (found[i].prompt, len(found[i].tokens)) == (prompt, most)
        seen = target.see(torch.tensor([prompt + found[i].tokens], device="cuda"))
        best = seen.best[0, len(prompt) - 1 : -1].tolist()
        same += sum(one == other for one, other in zip(best, found[i].tokens, strict=True))
        total += most
    assert same > 0.95 * total  # in bfloat16, where another number of rows may round two close ones otherwise
    # Drawn answers differ from each other, greedy ones beside them do not.
    jobs = [(i, [5, 6, 7], 1.0 if i % 2 else 0.0, 40) for i in range(32)]
    found = spoken(Lockstep(Rows(target, count, 128, 0), ()), jobs)
    assert len({tuple(found[i].tokens) for i in range(1, 32, 2)}) > 8
    assert len({tuple(found[i].tokens) for i in range(0, 32, 2)}) == 1
