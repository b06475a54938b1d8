"""What `quire train` says when nothing is named; each training is a module of its own."""

from __future__ import annotations

INTRO = "Trains what makes a model faster, on this machine and on the model's own answers."
EXAMPLES = (
    "examples:\n"
    "  quire train eagle --out head --self 5000000 --device cuda     a head that guesses SmolLM2's next tokens"
)
