"""Writes beside a trained head what it is, how it was made and how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.training.eagle import Acceptance


def write_card(folder: Path, model: str, options: Mapping[str, Any], found: Acceptance, steps: int, seconds: float,
               tokens: int) -> None:
    hidden = ("out", "verbose", "model", "data")
    shown = {name: value for name, value in sorted(options.items()) if value is not None and name not in hidden}
    asked = "that the model made up" if options.get("data") is None else f"of {Path(options['data']).name}"
    rates = ", ".join(f"{share:.3f}" for share in found.chain)
    lines = [
        f"# An EAGLE head for {Path(model).stem if Path(model).exists() else model}",
        "",
        "Made by `quire train eagle` on answers that the model itself gave; it holds nothing else. Its projection to",
        "the vocabulary and its embeddings are the model's own.",
        "",
        f"- Trained on {tokens:,} tokens (questions {asked}, and answers), {steps} steps, {seconds:.0f} s.",
        f"- Held-out texts, greedy chains, share of places whose first 1, 2, ... drafts are all right: {rates}.",
        f"- Decoding them gives {found.tokens_per_step:.3f} tokens a step with {len(found.chain)} drafts; loss "
        f"{found.loss:.4f}.",
        f"- Options: {', '.join(f'{name}={value}' for name, value in shown.items())}.",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
