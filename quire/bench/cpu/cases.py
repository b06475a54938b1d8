"""The four CPU workloads as data: prompts as token ids and the number of tokens to generate for each.

A: one stream, 64 in, 128 out. B: 32 requests at once, 16-512 in, 16-128 out. C: one prompt of 2,048.
D: 32 requests that share 512 tokens, 16 of their own, 16 out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CASES = ("A", "B", "C", "D")
RIVALS = ("transformers", "onnxruntime-genai", "llama.cpp")
"""Engines that run the cases beside Quire (rivals.py, contestant.py)."""


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: list[list[int]]
    outputs: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.outputs)


def workload(case: str, vocab_size: int) -> Workload:
    """The same ids on every machine and for every engine."""
    rng = random.Random(f"quire-{case}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, vocab_size) for _ in range(count)]

    if case == "A":
        return Workload([tokens(64)], [128])
    if case == "B":
        return Workload([tokens(rng.randint(16, 512)) for _ in range(32)], [rng.randint(16, 128) for _ in range(32)])
    if case == "C":
        return Workload([tokens(2048)], [1])
    shared = tokens(512)
    return Workload([shared + tokens(16) for _ in range(32)], [16] * 32)
