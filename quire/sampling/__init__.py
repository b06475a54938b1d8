"""How the next token is chosen: parameters, random numbers and the batched sampler (import torch parts by module)."""

from quire.sampling.params import BeamSearchParams, SamplingParams

__all__ = ["BeamSearchParams", "SamplingParams"]
