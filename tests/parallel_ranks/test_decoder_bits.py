"""The contract of ranks: the bits of a token's logits do not depend on how many ranks share the model."""

from __future__ import annotations

import mmap
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import RankLostError
from quire.models.build import build_decoder
from quire.models.loader.source import resolve_model
from quire.ops.cpu import CpuOps
from quire.parallel.collectives import Collectives
from quire.parallel.place import Place
from quire.parallel.shared import SharedGroup, SharedLink, abort, shared_group_bytes, shared_link_bytes
from tests.checkpoints import FAMILY_NAMES, config_of, make_model, weights_of
from tests.models.loader.tiny_gguf import tiny_model, write_gguf
from tests.paged_driver import PagedDriver
from tests.parallel_ranks.rank_threads import rank_decoders, side_by_side

TOKENS = random.Random(0).choices(range(96), k=44)
CHUNKS = [17, 22, 1, 1, 1, 2]
SINGLE = [17] + [1] * 27
WIDE: dict[str, dict[str, Any]] = {"gpt2": {"n_inner": 272}, "opt": {"ffn_dim": 272}}
"""Eight slices of the MLP, the last of them shorter: so that all sizes up to eight can be."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "opt": {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
    "gemma3": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
}
SIZES = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)]


@cache
def one_rank(family: str, **more: Any) -> tuple[dict[str, Any], list[tuple[str, Tensor]], Tensor]:
    overrides = {**WIDE.get(family, {"intermediate_size": 272}), **OVERRIDES.get(family, {}), **more}
    model = make_model(family, **overrides)
    config, weights = config_of(model), weights_of(model)
    decoder = build_decoder(config, [(name, tensor.clone()) for name, tensor in weights], CpuOps(num_threads=1),
                            max_model_len=128)
    return config, weights, PagedDriver(decoder, num_blocks=16).run(0, TOKENS, CHUNKS)


def of_ranks(config: dict[str, Any], weights: list[tuple[str, Tensor]], tensor_size: int, num_stages: int,
             collectives: list[Collectives] | None = None) -> Tensor:
    """Logits of the same sequence, from the rank that draws."""
    drivers = [PagedDriver(decoder, num_blocks=16)  # type: ignore[arg-type]
               for decoder in rank_decoders(config, weights, tensor_size, num_stages, collectives)]
    found = side_by_side([lambda driver=driver: driver.run(0, TOKENS, CHUNKS) for driver in drivers])
    return found[(num_stages - 1) * tensor_size]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_any_number_of_ranks_gives_the_same_bits(family: str) -> None:
    config, weights, expected = one_rank(family)
    assert expected.abs().max() > 0
    for tensor_size, num_stages in SIZES:
        assert torch.equal(of_ranks(config, weights, tensor_size, num_stages), expected), (tensor_size, num_stages)


@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 4), ("olmo2", 5)])
def test_many_heads_are_shared_in_eight_ranges(family: str, kv_heads: int) -> None:
    """Twenty heads, ranges of two and of three; of OLMo 2 with a norm over all of them."""
    config, weights, expected = one_rank(family, hidden_size=160, num_attention_heads=20, num_key_value_heads=kv_heads)
    for size, stages in ((3, 1), (8, 1), (2, 2)):
        assert torch.equal(of_ranks(config, weights, size, stages), expected), (size, stages)


@pytest.mark.parametrize("size", [4, 5, 7, 8])
def test_more_ranks_than_kv_heads_and_uneven_runs(size: int) -> None:
    """Nine query heads to three kv heads, as SmolLM2 has: a kv head is held by up to four ranks."""
    config, weights, expected = one_rank("llama", hidden_size=144, num_attention_heads=9,
                                         num_key_value_heads=3)
    assert torch.equal(of_ranks(config, weights, size, 1), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_or_not_the_vocabulary_is_shared(family: str, tied: bool) -> None:
    config, weights, expected = one_rank(family, tie_word_embeddings=tied)
    for tensor_size, num_stages in ((3, 1), (2, 3)):
        assert torch.equal(of_ranks(config, weights, tensor_size, num_stages), expected)


def in_shared_memory(tensor_size: int, num_stages: int, slot: int = 2048) -> list[Collectives]:
    """As between processes, with slots so small that most exchanges take several rounds."""
    capacity = 1000
    groups = [mmap.mmap(-1, shared_group_bytes(tensor_size, slot)) for _ in range(num_stages)]
    links = [[mmap.mmap(-1, shared_link_bytes(capacity)) for _ in range(tensor_size)] for _ in range(num_stages)]
    found = []
    for place in Place.all(tensor_size, num_stages):
        group = SharedGroup(groups[place.stage], place.tensor_rank, tensor_size, 60.0, slot)
        after = links[(place.stage + 1) % num_stages][place.tensor_rank]
        found.append(Collectives(group if tensor_size > 1 else None,
                                 SharedLink(links[place.stage][place.tensor_rank], sends=False, timeout=60.0),
                                 SharedLink(after, sends=True, timeout=60.0)))
    return found


@pytest.mark.parametrize("family", ["llama", "olmo2", "opt"])
def test_through_shared_memory_too(family: str) -> None:
    config, weights, expected = one_rank(family)
    for tensor_size, num_stages in ((2, 1), (3, 1), (2, 2)):
        peers = in_shared_memory(tensor_size, num_stages)
        assert torch.equal(of_ranks(config, weights, tensor_size, num_stages, peers), expected)
        assert all(each.waited_ns > 0 for each in peers)


@pytest.mark.parametrize(("family", "replayed"), [("llama", True), ("gemma3", True), ("olmo2", False)])
def test_steps_of_ranks_are_recorded_where_kernels_exchange_by_themselves(family: str, replayed: bool) -> None:
    """OLMo 2 exchanges sums of squares outside the kernels: its tensor ranks make plain calls."""
    config, weights, expected = one_rank(family)
    for tensor_size, num_stages in ((2, 1), (3, 1), (1, 2), (2, 2)):
        peers = in_shared_memory(tensor_size, num_stages, 1 << 16)
        decoders = rank_decoders(config, weights, tensor_size, num_stages, peers)
        runs = side_by_side([lambda decoder=decoder: PagedDriver(decoder, num_blocks=16).run(0, TOKENS, SINGLE)
                             for decoder in decoders])
        assert torch.equal(runs[-tensor_size], expected)
        recorders = [decoder.recorder for decoder in decoders]
        assert all((recorder.replayed > 0) == (replayed or tensor_size == 1) for recorder in recorders)


def test_a_replayed_step_ends_when_another_rank_is_lost() -> None:
    """It is not run again: the others would be handed values of other layers."""
    config, weights, _ = one_rank("llama")
    memory = mmap.mmap(-1, shared_group_bytes(2, 1 << 16))
    peers = [Collectives(SharedGroup(memory, rank, 2, 60.0, 1 << 16)) for rank in range(2)]
    decoders = rank_decoders(config, weights, 2, 1, peers)
    drivers = [PagedDriver(decoder, num_blocks=16) for decoder in decoders]
    side_by_side([lambda driver=driver: driver.run(0, TOKENS[:8], [1] * 8) for driver in drivers])
    replayed = decoders[0].recorder.replayed
    assert replayed > 0
    abort(memory)
    with pytest.raises(RankLostError, match="told to stop"):
        drivers[0].step({0: TOKENS[8:9]})
    assert decoders[0].recorder.replayed == replayed


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_packed_weights_are_cut_at_the_borders_of_slices(quant: str, tmp_path: Path) -> None:
    """Heads of 32 columns, so that every projection is packed; a rank's part may be packed in another way."""
    model = tiny_model("llama", head_dim=32, intermediate_size=256)
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", "llama", model, quant)))
    weights = list(source.weights())
    decoder = build_decoder(source.config, [(name, tensor.clone()) for name, tensor in weights], CpuOps(num_threads=1),
                            max_model_len=128)
    layer = decoder.layers[0]
    packed = {each.packed.format for each in (layer.attn.qkv, layer.attn.out, layer.mlp.up, layer.mlp.down)}
    assert packed == {"BF16": {"bfloat16"}, "Q4_1": {"scaled4"}, "Q8_0": {"scaled8"}}.get(quant, packed)
    expected = PagedDriver(decoder, num_blocks=16).run(0, TOKENS, CHUNKS)
    for tensor_size, num_stages in ((3, 1), (2, 2)):
        assert torch.equal(of_ranks(source.config, weights, tensor_size, num_stages), expected)
