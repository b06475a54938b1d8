"""Triton's interpreter made ready for tests: switched on where there is no GPU, mended for NumPy 2.4 and bfloat16, and
with dot products whose bits do not depend on the machine's BLAS."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace


def prepare() -> bool:
    """False where Triton is not installed. Call before any kernel module is imported: Triton looks then."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return False
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        _mend_loop_bounds()
        _mend_dots()
        _mend_fp8()
        _mend_assembler()
    return True


def _mend_fp8() -> None:
    """Triton 3.6 loses the carry where rounding up to fp8 reaches a power of two: 127 becomes 64."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_quire_fp8", False):
        return
    original = interpreter._convert_float

    def patched(values, input_dtype, output_dtype, rounding_mode):  # type: ignore[no-untyped-def]
        if output_dtype != tl.float8e4nv or input_dtype != tl.float32:
            return original(values, input_dtype, output_dtype, rounding_mode)
        wide = torch.from_numpy(values.view("float32").copy())
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = patched
    interpreter._quire_fp8 = True


def _mend_assembler() -> None:
    """Triton's interpreter runs no assembler: what the one piece of it in kernels that run here does, element by
    element."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    def run(self, text, constraints, values, types, pure, pack):  # type: ignore[no-untyped-def]
        from quire.kernels.triton.attention_decode import TWO_NUMBERS

        if text != TWO_NUMBERS.value:
            raise NotImplementedError(text)
        words = torch.from_numpy(values[0].data.view("uint8").reshape(*values[0].data.shape, 2).copy())
        numbers = words.view(torch.float8_e4m3fn).half()
        found = [interpreter.TensorHandle(numbers[..., place].numpy(), tl.float16) for place in range(2)]
        return SimpleNamespace(get_result=found.__getitem__)

    interpreter.InterpreterBuilder.create_inline_asm = run


def _mend_loop_bounds() -> None:
    """Triton 3.6 turns a loop bound into an int by int(array of one element), which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    if getattr(interpreter, "_quire_mended", False):
        return
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched
    interpreter._quire_mended = True


def fixed_order_matmul(a, b):  # type: ignore[no-untyped-def]
    """`a @ b` of NumPy arrays, each element summed in the same order wherever it lies in its tile, as tensor cores do.
    BLAS does not promise that: on an AMD EPYC (Zen 5), OpenBLAS sums the last rows of a tile in another order."""
    import numpy as np

    return np.einsum("...ik,...kj->...ij", a, b, optimize=False)


def _mend_dots() -> None:
    """Triton 3.6 multiplies the bit patterns of bfloat16 matrices, which it keeps as integers of 16 bits, and leaves
    the order of sums to BLAS."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_quire_mended", False):
        return

    def numbers(handle, dtype):  # type: ignore[no-untyped-def]
        data = handle.data
        if handle.dtype.scalar == tl.bfloat16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        elif handle.dtype.is_floating() and handle.dtype.primitive_bitwidth == 8:
            data = interpreter._convert_float(data, handle.dtype, tl.float16, None).view(np.float16)
        return data.astype(dtype, copy=False)

    def fixed(self, a, b, d, *rest):  # type: ignore[no-untyped-def]
        dtype = d.data.dtype
        found = fixed_order_matmul(numbers(a, dtype), numbers(b, dtype)) + d.data
        return interpreter.TensorHandle(found, d.dtype.scalar)

    builder.create_dot = fixed
    builder._quire_mended = True
