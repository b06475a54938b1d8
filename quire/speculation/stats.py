"""Running totals of speculation, which the metrics report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    decode_steps: int = 0
    """Times that a decoding sequence was computed, with drafts or without."""
    decode_tokens: int = 0
    """Tokens that came of those."""
    verifications: int = 0
    """Those with drafts."""
    offered: list[int] = field(default_factory=list)
    """By place in the draft: how many were computed there."""
    accepted: list[int] = field(default_factory=list)

    def computed(self, num_tokens: int) -> None:
        """A decoding sequence was computed."""
        self.decode_steps += 1
        self.decode_tokens += num_tokens

    def judged(self, offered: list[int], num_accepted: int) -> None:
        """There were drafts, so many at each place."""
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
