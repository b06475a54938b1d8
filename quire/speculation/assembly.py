"""Makes the speculator that `speculative_config` asks for."""

from __future__ import annotations

from quire.speculation.ngram import NgramSource
from quire.speculation.options import NGRAM, SUFFIX, SpeculationOptions
from quire.speculation.speculator import DeviceSpeculator, LookupSpeculator, Speculator
from quire.speculation.suffix import SuffixSource


def build_speculator(options: SpeculationOptions | None, draft_rows: int = 0) -> Speculator | None:
    """`draft_rows`: most drafts in one step of a GPU (0: a CPU, where the step's budget is the limit)."""
    speculator = None if options is None else _speculator(options)
    if speculator is not None and draft_rows:
        speculator.most_in_step = draft_rows
    return speculator


def _speculator(options: SpeculationOptions) -> Speculator:
    most, adaptive = options.num_speculative_tokens, options.adaptive
    if options.method == NGRAM:
        return LookupSpeculator(NgramSource(options.prompt_lookup_min), most, adaptive)
    if options.method == SUFFIX:
        return LookupSpeculator(SuffixSource(options.prompt_lookup_min, options.max_cached_tokens), most, adaptive)
    return DeviceSpeculator(most, adaptive, own_kv=options.own_kv)
