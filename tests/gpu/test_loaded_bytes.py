"""What loading a quantized file takes of a GPU's memory at the worst moment."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from tests import loaded_bytes


def most_held(folder: Path) -> tuple[int, int]:
    """(Bytes at the worst moment, bytes of the weights in the end)."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder = loaded_bytes.load(folder, "cuda", packed=True)
    return torch.cuda.max_memory_allocated() - before, decoder.weight_bytes


@pytest.mark.parametrize("kind", ["AWQ", "GPTQ with act-order", "compressed-tensors int8", "fp8 in blocks"])
@torch.inference_mode()
def test_a_quantized_file_is_never_held_in_16_bits_as_well(kind: str, tmp_path: Path) -> None:
    """Whatever a tensor takes on its way, more layers add what they are packed."""
    floats, most, weights = [], [], []
    for layers in (2, 4):
        floats.append(loaded_bytes.write_layers(tmp_path / str(layers), kind, layers, hidden=512))
        found = most_held(tmp_path / str(layers))
        most.append(found[0])
        weights.append(found[1])
    more_floats, more, more_weights = (after - before for before, after in (floats, most, weights))
    assert more <= 1.1 * more_weights < 0.7 * 1.1 * more_floats
