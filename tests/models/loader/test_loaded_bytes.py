"""What a GPU's loader holds at once, measured on CPU tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from tests import loaded_bytes


def most_held(folder: Path, packed: bool) -> tuple[int, int]:
    """(Bytes of tensors at the worst moment, bytes of the weights in the end). The file, which is mapped while it is
    read and counts as torch's memory, is left out."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decoder = loaded_bytes.load(folder, "cpu", packed)
    held = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most - (folder / "model.safetensors").stat().st_size, decoder.weight_bytes


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", loaded_bytes.KINDS)
def test_a_quantized_file_is_never_held_in_16_bits_as_well(kind: str, packed: bool, tmp_path: Path) -> None:
    """Whatever a tensor takes on its way, more layers add what they are packed; read as floats, all in 16 bits."""
    floats, most, weights = [], [], []
    for layers in (4, 8):
        folder = tmp_path / str(layers)
        floats.append(loaded_bytes.write_layers(folder, kind, layers, hidden=128))
        found = most_held(folder, packed)
        most.append(found[0])
        weights.append(found[1])
    more_floats, more, more_weights = (after - before for before, after in (floats, most, weights))
    assert more_weights <= more <= 1.1 * more_weights  # orders of columns are not counted among the weights
    assert more_weights < 0.7 * more_floats if packed else more_weights == more_floats
