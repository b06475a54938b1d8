"""Rows with all kinds of sampling settings, drawn by the kernels and by the reference sampler; any device."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import sampled_row
from quire.kernels.triton.sample import SampledStep, SampleScratch, sample_rows
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.params import SamplingParams
from quire.sampling.sampler import SamplerOutput, sample
from quire.sampling.token_logprobs import unpack_all
from quire.scheduler.plan import RowStart
from quire.worker.gpu.sampled_stage import RowSettings, SampledRows, SampledStage

MAX_LEN = 24


@dataclass
class Case:
    """One row: its request, its text, its grammar's mask."""

    start: RowStart
    text: list[int]
    mask: bytes


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    """Every setting by itself and with the others."""
    def ids(count: int) -> list[int]:
        return rng.sample(range(vocab), count)

    chosen: dict[str, Any] = {"temperature": rng.choice([0.0, 0.3, 0.8, 1.0, 1.7, 40.0])}
    options: dict[str, Any] = {
        "top_k": rng.choice([1, 2, 5, 20, vocab - 1, vocab, vocab * 2]),
        "top_p": rng.choice([0.01, 0.3, 0.9, 0.95, 0.999, 1.0]),
        "min_p": rng.choice([0.01, 0.2, 1.0]),
        "presence_penalty": rng.choice([0.5, -0.5]),
        "frequency_penalty": rng.choice([0.3, -1.0]),
        "repetition_penalty": rng.choice([1.1, 0.7]),
        "logit_bias": {token: rng.choice([-100.0, 3.0, 0.25]) for token in ids(3)},
        "allowed_token_ids": ids(rng.choice([1, vocab // 2])),
        "min_tokens": rng.choice([1, 100]),
        "logprobs": rng.choice([0, 1, 5, 20]),
    }
    for name in rng.sample(sorted(options), rng.choice([0, 1, 1, 2, 3, 5])):
        chosen[name] = options[name]
    return SamplingParams(max_tokens=200, **chosen)


def random_case(rng: random.Random, row: int, vocab: int) -> Case:
    text = [rng.randrange(vocab) for _ in range(rng.randrange(1, MAX_LEN))]
    num_prompt = rng.randrange(1, len(text) + 1)
    words = [[rng.randrange(vocab)], [*text[-2:], 3], [text[-1], 5], [9, 9, 9]] if rng.random() < 0.3 else []
    start = RowStart(row, text, num_prompt, random_params(rng, vocab), rng.getrandbits(64), rng.randrange(3),
                     stop_ids=[0, 7], bad_words=words)
    mask = b""
    if rng.random() < 0.25:
        bits = np.random.default_rng(rng.randrange(1000)).random(-(-vocab // 32) * 32) < rng.choice([0.02, 0.6])
        mask = np.packbits(bits, bitorder="little").tobytes()
    return Case(start, text, mask)


def random_logits(rows: int, vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    """Rows of several kinds: with many ties, flat, steep, broken."""
    logits = torch.randn(rows, vocab, generator=generator)
    logits *= torch.tensor([3.0, 0.05, 30.0, 1.0])[torch.arange(rows) % 4, None]
    logits[1::5] = (logits[1::5] * 2).round() / 2
    logits[3::7] = 0.0
    logits[3::7, ::2] = -0.0
    if rows > 11:
        logits[9, 3], logits[10, 5], logits[11] = torch.nan, torch.inf, -torch.inf
    return logits.to(device=device, dtype=dtype)


def reference(logits: Tensor, cases: list[Case]) -> SamplerOutput:
    """What the sampler draws, on the host."""
    rows = []
    for case in cases:
        start = case.start
        row = SamplingRow(start.params, start.seed, start.sequence_index, case.text, start.num_prompt_tokens,
                          start.stop_ids, start.bad_words)
        row.mask = case.mask
        rows.append(row)
    return sample(logits.float().cpu(), SamplingBatch.build(rows, logits.shape[1]))


class Drawn:
    """The same cases drawn by the kernels, each in a place and a table row that are not its number."""

    def __init__(self, logits: Tensor, cases: list[Case], padding: int = 2, **scratch: int) -> None:
        count, vocab, device = len(cases), logits.shape[1], logits.device
        order = list(range(count))
        random.Random(count).shuffle(order)
        tokens = torch.zeros(count, MAX_LEN, dtype=torch.int32)
        for case, row in zip(cases, order, strict=True):
            tokens[row, : len(case.text)] = torch.tensor(case.text, dtype=torch.int32)
        places = np.arange(count, dtype=np.int32)
        penalised = np.array([case.start.params.penalised for case in cases], bool)
        rows = SampledRows(places, np.array(order, np.int32), np.array([len(case.text) for case in cases], np.int32),
                           [case.mask for case in cases], np.where(penalised, places, -1), np.zeros_like(places))
        stage = SampledStage(rows, [RowSettings.of(case.start, vocab) for case in cases], vocab)
        words = torch.from_numpy(stage.words(count + padding, 1)).to(device)
        self.staged = words.cpu().clone()
        self.wants = stage.wants
        self.tokens = tokens.to(device)
        out = torch.zeros(2, count, 2, dtype=torch.int32, device=device)
        report = torch.zeros(2, count, sampled_row.REPORT_WORDS, dtype=torch.int32, device=device)
        edited = torch.full((count + padding, vocab), torch.nan, device=device)
        counts = torch.zeros(count, vocab, dtype=torch.int32, device=device)
        self.scratch = memory = SampleScratch.allocate(count + padding, vocab, device, **scratch)
        step = SampledStep(words, logits, self.tokens, out, report, edited, counts)
        sample_rows(step, count + padding, self.wants | sampled_row.Wants.DRAW, memory)
        self.advanced = words.cpu()
        """What was staged, and what the draw has left of it."""
        self.token_ids, self.status = out[1, :, 0].cpu(), out[1, :, 1].cpu()
        self.report = report[1].cpu()
        self.written = [int(self.tokens[row, len(case.text)]) if len(case.text) < MAX_LEN else None
                        for case, row in zip(cases, order, strict=True)]

    def reported(self, place: int, count: int) -> tuple[int, float, int, list[int], list[float]]:
        words = self.report[place]
        floats = words.view(torch.float32)
        top = sampled_row.TOP
        return (int(words[0]), float(floats[1]), int(words[2]), words[3 : 3 + count].tolist(),
                floats[3 + top : 3 + top + count].tolist())


def check_sampling(device: str, dtype: torch.dtype, rows: int, vocab: int, seed: int, **scratch: int) -> int:
    """Rows that drew another token than the reference; statuses, and reports of equal tokens, must agree."""
    rng = random.Random(seed)
    cases = [random_case(rng, row, vocab) for row in range(rows)]
    cases[0].start.params = SamplingParams(top_p=0.9)
    logits = random_logits(rows, vocab, dtype, device, torch.Generator().manual_seed(seed))
    want, got = reference(logits, cases), Drawn(logits, cases, **scratch)
    if not torch.equal(want.status, got.status.long()):
        raise AssertionError(f"statuses {got.status.tolist()} are not {want.status.tolist()}")
    wrong = [i for i in range(rows) if int(want.token_ids[i]) != int(got.token_ids[i])]
    assert [int(t) for t, w in zip(got.token_ids, got.written, strict=True) if w is not None] == [
        w for w in got.written if w is not None]
    told = want.logprobs
    found = {} if told is None else dict(zip(told.rows, unpack_all(told.records()), strict=True))
    for row, one in found.items():
        if row in wrong or int(want.status[row]):
            continue
        mine = got.reported(row, len(one.top_ids))
        if (mine[0], mine[2], mine[3]) != (one.token_id, one.rank, one.top_ids):
            raise AssertionError(f"row {row} reports {mine} for {one}")
        torch.testing.assert_close(torch.tensor([mine[1], *mine[4]]), torch.tensor([one.logprob, *one.top_logprobs]),
                                   atol=2e-6, rtol=2e-6)
    return len(wrong)
