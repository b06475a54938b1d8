"""What two engines must agree on before KV goes between them, and what only the receiving one decides."""

from __future__ import annotations

import pytest
import torch

from quire.errors import KVMismatchError
from quire.kvtransfer.fingerprint import Fingerprint
from quire.peers.tensors import TensorMover
from tests.kvtransfer.layouts import Model, make_store

MODEL = Model(heads=2, width=4, windows=(None,))


def mover(dtype: torch.dtype, *, receives: bool, convert: bool = False,
          transports: tuple[str, ...] = ("tcp",)) -> TensorMover:
    store = make_store(MODEL, 4, 8, tokens_last=False, dtype=dtype)
    who = Fingerprint("model", "weights", "rope", "tokenizer", 1, store.layout.dtype)
    return TensorMover(store, b"a secret of the tests", who, transports, "127.0.0.1", receives=receives,
                       convert=convert, timeout=5.0)


def test_who_receives_says_whether_elements_are_converted() -> None:
    """The prefill side need not be told: it converts nothing."""
    prefill = mover(torch.bfloat16, receives=False)
    decode = mover(torch.float32, receives=True, convert=True)
    try:
        decode.check(prefill.describe(), receives=True)
        prefill.check(decode.describe(), receives=False)
        prefill.sender(decode.describe()).close()
    finally:
        decode.close()


@pytest.mark.parametrize("sends", [False, True], ids=["nobody asks", "only the sender asks"])
def test_without_that_another_dtype_is_refused_on_both_sides(sends: bool) -> None:
    prefill = mover(torch.bfloat16, receives=False, convert=sends)
    decode = mover(torch.float32, receives=True)
    try:
        for side, other, receives in ((decode, prefill, True), (prefill, decode, False)):
            with pytest.raises(KVMismatchError, match="another cache dtype") as refused:
                side.check(other.describe(), receives=receives)
            assert refused.value.field == "dtype"
    finally:
        decode.close()


def test_engines_without_a_transport_in_common_find_out_before_anything_is_computed() -> None:
    prefill = mover(torch.float32, receives=False, transports=("shm",))
    decode = mover(torch.float32, receives=True, transports=("tcp",))
    try:
        for side, other, receives in ((decode, prefill, True), (prefill, decode, False)):
            with pytest.raises(KVMismatchError, match=r"no transport in common.*kv_transports") as refused:
                side.check(other.describe(), receives=receives)
            assert refused.value.field == "transports"
    finally:
        decode.close()
