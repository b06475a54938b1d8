"""Where one rank stands among the ranks that share a model, as plain data. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Tensor rank `tensor_rank` of `tensor_size` in pipeline stage `stage` of `num_stages`."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.tensor_rank < self.tensor_size and 0 <= self.stage < self.num_stages):
            raise ValueError(f"no place among ranks: {self}")

    @classmethod
    def all(cls, tensor_size: int, num_stages: int) -> list[Place]:
        """Every rank of an engine, in the order of `index`: the ranks of a stage lie side by side."""
        return [cls(rank, tensor_size, stage, num_stages) for stage in range(num_stages) for rank in range(tensor_size)]

    @property
    def index(self) -> int:
        """This rank's number among all."""
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def num_ranks(self) -> int:
        return self.tensor_size * self.num_stages

    @property
    def is_first(self) -> bool:
        """Whether this rank's stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage has the head."""
        return self.stage == self.num_stages - 1

    @property
    def is_sampler(self) -> bool:
        """Whether this rank draws the tokens, and so has the results of a step."""
        return self.is_last and self.tensor_rank == 0
