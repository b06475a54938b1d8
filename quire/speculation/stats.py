"""Running totals of speculation, which the metrics report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    decode_steps: int = 0
    """Decode steps, counted once per sequence, with drafts or without."""
    decode_tokens: int = 0
    """Output tokens of those."""
    verifications: int = 0
    """Decode steps with drafts."""
    offered: list[int] = field(default_factory=list)
    """Drafts verified, by place in the chain or depth in the tree."""
    accepted: list[int] = field(default_factory=list)

    def computed(self, num_tokens: int) -> None:
        """Count one decode step of one sequence."""
        self.decode_steps += 1
        self.decode_tokens += num_tokens

    def judged(self, offered: list[int], num_accepted: int) -> None:
        """Count its drafts: `offered` by place, of which the first `num_accepted` places were accepted."""
        self.verifications += 1
        while len(self.offered) < len(offered):
            self.offered.append(0)
            self.accepted.append(0)
        for place, count in enumerate(offered):
            self.offered[place] += count
            self.accepted[place] += place < num_accepted

    def flat(self) -> dict[str, int | float]:
        offered, accepted = sum(self.offered), sum(self.accepted)
        figures: dict[str, int | float] = {
            "spec_decode_steps": self.decode_steps,
            "spec_decode_tokens": self.decode_tokens,
            "spec_verifications": self.verifications,
            "spec_draft_tokens": offered,
            "spec_accepted_tokens": accepted,
            "spec_acceptance_rate": accepted / offered if offered else 0.0,
            "spec_tokens_per_step": self.decode_tokens / self.decode_steps if self.decode_steps else 0.0,
        }
        for place, (tried, kept) in enumerate(zip(self.offered, self.accepted, strict=True), start=1):
            figures[f"spec_draft_tokens_at_{place}"] = tried
            figures[f"spec_accepted_tokens_at_{place}"] = kept
            figures[f"spec_acceptance_rate_at_{place}"] = kept / tried
        return figures
