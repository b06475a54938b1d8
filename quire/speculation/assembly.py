"""Makes the speculator that `speculative_config` asks for."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.speculation.device_speculator import DeviceSpeculator
from quire.speculation.ngram import NgramSource
from quire.speculation.options import NGRAM, REJECTION, SUFFIX, SpeculationOptions
from quire.speculation.speculator import LookupSpeculator, Speculator
from quire.speculation.suffix import SuffixSource


def build_speculator(options: SpeculationOptions | None, draft_rows: int = 0) -> Speculator | None:
    """`draft_rows`: most drafts in one step on a GPU; 0: on a CPU, where only the token budget limits them."""
    if options is not None and options.min_draft_probability is not None and draft_rows:
        raise ConfigError("speculative_config min_draft_probability is for device='cpu': on a GPU nobody waits to see "
                          "how likely a draft is", field="speculative_config")
    speculator = None if options is None else _speculator(options, gpu=draft_rows > 0)
    if speculator is not None and draft_rows:
        speculator.most_in_step = draft_rows
    return speculator


def _speculator(options: SpeculationOptions, gpu: bool) -> Speculator:
    most, adaptive, tree = options.num_speculative_tokens, options.adaptive, options.tree
    if tree is not None:
        most = tree.depth
    if options.method == NGRAM:
        return LookupSpeculator(NgramSource(options.prompt_lookup_min), most, adaptive, tree=tree, gpu=gpu)
    if options.method == SUFFIX:
        source = SuffixSource(options.prompt_lookup_min, options.max_cached_tokens)
        return LookupSpeculator(source, most, adaptive, tree=tree, gpu=gpu)
    cuts = options.chain_floor > 0.0 and not gpu
    ahead = gpu and options.reads_states and tree is None and options.verifier != REJECTION
    return DeviceSpeculator(most, adaptive, own_kv=options.own_kv, tree=tree, cuts=cuts, gpu=gpu, ahead=ahead,
                            rests=gpu and options.reads_states, cuts_drawn=options.verifier != REJECTION)
