"""A Llama as a mixture of one expert in each layer, which every token goes to with weight 1: the same function.

So a dense model has weights in formats that are read packed for experts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from quire.bench.checkpoints.gguf_file import StoredTensor
from quire.errors import QuireError
from quire.models.loader.gguf import MetadataValue

MLP_MATRIX = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.weight")
_MLP_NORM = re.compile(r"(blk\.\d+\.ffn)_norm\.weight")


def one_expert(
    metadata: Mapping[str, MetadataValue], tensors: Iterable[StoredTensor]
) -> tuple[dict[str, MetadataValue], list[StoredTensor]]:
    """What the file says about the model, and its tensors: of a Mixtral, which in GGUF is a Llama with experts."""
    arch = metadata["general.architecture"]
    if arch != "llama":
        raise QuireError(f"only a GGUF of llama's architecture is written as a mixture of experts, this one is {arch}")
    return {**metadata, "llama.expert_count": 1, "llama.expert_used_count": 1}, list(_as_experts(tensors))


def _as_experts(tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Each matrix of an MLP as that of all experts, and a router beside each MLP's norm."""
    for tensor in tensors:
        if matrix := MLP_MATRIX.fullmatch(tensor.name):
            yield replace(tensor, name=f"{matrix[1]}_exps.weight", shape=(1, *tensor.shape))
            continue
        yield tensor
        if norm := _MLP_NORM.fullmatch(tensor.name):
            # Any router does: the softmax of one expert's logit is 1.
            router = np.zeros((1, *tensor.shape), np.float32)
            yield StoredTensor(f"{norm[1]}_gate_inp.weight", router.shape, "F32", router)
