"""How the next token is chosen: parameters, random numbers and the batched sampler."""

from quire.sampling.params import BeamSearchParams, SamplingParams

__all__ = ["BeamSearchParams", "SamplingParams"]
