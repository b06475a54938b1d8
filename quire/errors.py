"""Quire's own exceptions: one class per kind of mistake, each message saying what to change."""

from __future__ import annotations


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """An engine option is unknown, out of range or contradicts another one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequestError(QuireError, ValueError):
    """A request cannot be served as asked; the engine and the other requests go on."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ChatTemplateError(InvalidRequestError):
    """The model's chat template is missing, refused the messages or did something unsafe."""


class ModelLoadError(QuireError):
    """A model's files are missing, truncated, corrupted or of a shape that cannot be."""


class UnsupportedModelError(ModelLoadError):
    """The architecture (or one of its features) is not one that Quire knows."""


class DownloadError(QuireError):
    """A model could not be fetched: no network, no disk, wrong checksum."""


class KernelBuildError(QuireError):
    """The compiled CPU kernels are missing or do not run on this machine."""


class OutOfMemoryError(QuireError):
    """The machine has no room for what was asked; the message says what to lower."""


class EngineError(QuireError):
    """The engine itself failed; requests in flight are reported with this."""


class InvariantError(EngineError):
    """The engine's bookkeeping contradicts itself; the sequences concerned are quarantined."""


class StepError(EngineError):
    """A step failed on every tensor rank of its stage alike: its rows are lost, the ranks are still in step."""


class RankLostError(EngineError):
    """A rank that shares the model has died, hangs or has failed: the step cannot be finished, nor any after it."""


class EngineDeadError(EngineError):
    """The engine's process died, hangs, restarts or was shut down: what was in flight is lost, try again."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which trying again makes sense; None where it does not."""


class QuarantinedError(EngineDeadError):
    """Requests of this content were running when the engine died, more than once: it is not tried again for a while."""


class QueueFullError(QuireError):
    """Too many requests or prompt tokens wait already; nothing of this one was taken in."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which there will probably be room."""


class RequestTimeoutError(QuireError):
    """The request was not done within its time and was given up."""


class KVUnitError(QuireError):
    """A unit of KV came back torn, changed or foreign. It counts as not there."""


class KVTransferError(QuireError):
    """KV could not be sent to or taken from another engine; it is computed here instead, or fetched again."""


class KVMismatchError(KVTransferError):
    """The other engine's KV cannot be understood here: another model, rope, tokenizer, layout or cache dtype."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class PeerError(QuireError):
    """Another engine said something that it must not, cannot be reached, or refuses to talk."""
