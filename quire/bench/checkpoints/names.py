"""What the layouts are called, for a command line that must not import torch to say so."""

from __future__ import annotations

FOLDER_NAMES = (
    "compressed-fp8", "compressed-fp8-static", "fp8-blocks", "modelopt-fp8", "compressed-int8", "awq", "gptq",
    "gptq-zero-points", "gptq-act-order", "gptq-8-bits", "compressed-int4",
)  # fmt: skip
GGUF_NAMES = ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "mxfp4")
EXPERTS_NAME = "mxfp4-experts"
"""A GGUF of one expert a layer in MXFP4, all else in bf16, as gpt-oss has it."""
LAYOUT_NAMES = (*FOLDER_NAMES, *GGUF_NAMES, EXPERTS_NAME)
