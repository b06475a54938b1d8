"""Quire: an LLM inference and serving engine. `from quire import LLM, SamplingParams` is the front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config import EngineConfig
    from quire.engine.outputs.output import CompletionOutput, RequestOutput
    from quire.errors import ConfigError, InvalidRequestError, ModelLoadError, QuireError
    from quire.llm import LLM
    from quire.sampling.params import BeamSearchParams, SamplingParams
    from quire.structured.spec import StructuredOutputs

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "InvalidRequestError",
    "ModelLoadError",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

# Names resolve on first use, so that `import quire` costs milliseconds and never imports torch.
_HOMES = {
    "quire.async_llm": ("AsyncLLM",),
    "quire.config": ("EngineConfig",),
    "quire.engine.outputs.output": ("CompletionOutput", "RequestOutput"),
    "quire.errors": ("ConfigError", "InvalidRequestError", "ModelLoadError", "QuireError"),
    "quire.llm": ("LLM",),
    "quire.sampling.params": ("BeamSearchParams", "SamplingParams"),
    "quire.structured.spec": ("StructuredOutputs",),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
