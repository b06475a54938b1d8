"""The one way to have a plan carried out: hand it in, get a future."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

from quire.errors import EngineDeadError
from quire.kernels.routing import LayerLoad
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One of several ranks, for the view."""

    index: int
    stage: int
    tensor_rank: int
    memory: int
    """Bytes: of its GPU on a GPU, else resident in its process."""
    steps: int
    busy_seconds: float
    """In steps, so far."""
    waited_seconds: float
    """Of those: waiting for other ranks."""
    times: tuple[tuple[int, float, float], ...]
    """Its latest steps: number of the plan, begin and end by the monotonic clock, waits for other stages left out."""


class Executor(ABC):
    """Carries out plans in the order of `submit`, whatever runs them: a thread, processes, machines.

    The future holds the step's result, or the exception that lost the whole step. What concerns one sequence
    alone is not an exception but the `error` of its entry.

    Transfers of a plan go on beside the steps. Their reports come with the results of steps, or through `arrivals` at
    any time. Every transfer reports until it is finished, also those of a step that was lost.
    """

    @cached_property
    def arrivals(self) -> ArrivalBox:
        """Where transfers report when they like; it wakes a core that has nothing to do."""
        return ArrivalBox()

    @abstractmethod
    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a plan; may run it before returning."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no plan can be carried out any more: processes that it needs are lost. `arrivals` rings when that
        happens."""
        return None

    def describe_ranks(self) -> list[RankFacts]:
        """What is known of the processes that share the model; none where there is one."""
        return []

    def expert_load(self) -> list[LayerLoad]:
        """What the experts of each layer have done so far, as far as is known without waiting; none where the model has
        no experts."""
        return []

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Let go of threads, processes and memory. Idempotent."""
