"""How a head is trained, as plain data; no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    seed: int = 0
    steps: int = 2000
    batch_tokens: int = 16384
    max_length: int = 512
    learning_rate: float = 1e-3
    depth: int = 5
    """Drafted steps that are unrolled."""
    feature_weight: float = 0.1
    """Of the distance between guessed and true features, beside the loss of tokens."""
    draft_vocab: int = 4096
    intermediate: int = 768
    eval_every: int = 200
    save_every: int = 200
    max_seconds: float = float("inf")
    teacher_temperature: float = 0.7
    """Of the distribution that is learned. The head that is written guesses at 1 again."""
    weights: str = "bfloat16"
    """How matrices are stored: bfloat16, int8 with a scale for each row, or int4 in groups, also while training."""
    weight_decay: float = 0.01
    """Of matrices; vectors of norms keep theirs."""
    start: str = "auto"
    """target: at the target's last layer; random; auto: the former where it has the head's sizes."""
