"""Quire: an LLM inference and serving engine. `from quire import LLM, SamplingParams` is the front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names resolve on first use, so that `import quire` costs milliseconds and never imports torch.
_EXPORTS = {
    "LLM": "quire.llm",
    "SamplingParams": "quire.sampling.params",
    "EngineConfig": "quire.config",
    "RequestOutput": "quire.engine.output",
    "CompletionOutput": "quire.engine.output",
    "QuireError": "quire.errors",
    "ConfigError": "quire.errors",
    "InvalidRequestError": "quire.errors",
    "ModelLoadError": "quire.errors",
}

__all__ = [*_EXPORTS, "__version__"]  # noqa: PLE0604

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.output import CompletionOutput, RequestOutput
    from quire.errors import ConfigError, InvalidRequestError, ModelLoadError, QuireError
    from quire.llm import LLM
    from quire.sampling.params import SamplingParams


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
