"""Makes the speculator that `speculative_config` asks for."""

from __future__ import annotations

from quire.speculation.ngram import NgramSource
from quire.speculation.options import NGRAM, SUFFIX, SpeculationOptions
from quire.speculation.speculator import DeviceSpeculator, LookupSpeculator, Speculator
from quire.speculation.suffix import SuffixSource


def build_speculator(options: SpeculationOptions | None) -> Speculator | None:
    if options is None:
        return None
    most, adaptive = options.num_speculative_tokens, options.adaptive
    if options.method == NGRAM:
        return LookupSpeculator(NgramSource(options.prompt_lookup_min), most, adaptive)
    if options.method == SUFFIX:
        return LookupSpeculator(SuffixSource(options.prompt_lookup_min, options.max_cached_tokens), most, adaptive)
    return DeviceSpeculator(most, adaptive)
