"""Find the compiled kernels that suit this processor, load them and declare their functions."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

from quire.errors import KernelBuildError
from quire.kernels.cpu.build import FIX, SOURCE_DIR, VARIANTS, library_name, machine

# Flags of /proc/cpuinfo that a variant needs; a variant not named here runs anywhere on its machine.
_NEEDS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2"},
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
    "x86-64-v2": {"sse4_1", "sse4_2", "ssse3", "popcnt"},
}
_P, _I, _U, _N, _F = c_void_p, c_int64, c_uint64, c_int32, c_float
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "quire_abi_version": (_N, []),
    "quire_set_num_threads": (None, [_N]),
    "quire_get_num_threads": (_N, []),
    "quire_advise_huge_pages": (None, [_P, _I]),
    "quire_give_back": (None, []),
    "quire_packed_bytes": (_I, [_N, _I, _I]),
    "quire_pack": (_N, [_P, _P, _I, _I, _N]),
    "quire_linear": (None, [_P, _P, _N, _P, _P, _P, _I, _I, _I, _P, _I]),
    "quire_grouped_linear": (_N, [_P, _P, _I, _P, _I, _I]),
    "quire_sum_experts": (None, [_P] * 6 + [_I] * 5),
    "quire_embed": (None, [_P, _P, _N, _P, _I, _I]),
    "quire_int_kernel": (c_char_p, [_N]),
    "quire_int_bytes": (_I, [_P, _I]),
    "quire_int_pack": (None, [_P, _P, _I, _P, _P, _P]),
    "quire_int_round": (None, [_P, _I, _I, _I, _I, _P, _P, _P]),
    "quire_rms_norm": (None, [_P, _P, _P, _I, _I, _F]),
    "quire_norm_all_heads": (None, [_P] * 3 + [_I] * 4 + [_F]),
    "quire_head_squares": (None, [_P, _P] + [_I] * 4),
    "quire_norm_some_heads": (None, [_P] * 3 + [_I] * 5 + [_F]),
    "quire_layer_norm": (None, [_P, _P, _P, _P, _I, _I, _F]),
    "quire_act": (None, [_P, _P, _I, _I, _N]),
    "quire_act_mul": (None, [_P, _P, _I, _I, _N]),
    "quire_clamped_act_mul": (None, [_P, _P, _I, _I, _F, _F]),
    "quire_add": (None, [_P, _P, _P, _I]),
    "quire_scale": (None, [_P, _P, _I, _F]),
    "quire_rope_and_cache": (None, [_P] * 8 + [_I] * 6 + [_F]),
    "quire_attend": (_N, [_P] * 9 + [_I] * 10 + [_F, _F]),
    "quire_rope_and_code": (None, [_P] * 8 + [_I] * 6 + [_F]),
    "quire_attend_codes": (_N, [_P] * 9 + [_I] * 10 + [_F, _F]),
    "quire_latent_attend": (_N, [_P] * 7 + [_I] * 7 + [_F]),
    "quire_rope_latents": (None, [_P] * 6 + [_I] * 4),
    "quire_check_step": (_N, [_P] * 5 + [_I] * 8),
    "quire_check_ids": (_N, [_P, _I, _I]),
    "quire_copy_blocks": (None, [_P, _P, _P, _I, _I]),
    "quire_copy_slots": (None, [_P, _P, _P] + [_I] * 5),
    "quire_kv_wire": (None, [_P, _I, _P, _I, _N]),
    "quire_group_bytes": (_I, [_I, _I]),
    "quire_group_join": (None, [_P]),
    "quire_group_room": (_P, [_P, _P]),
    "quire_group_exchange": (_N, [_P, _I, _P, _P]),
    "quire_group_sum": (_N, [_P, _I, _P, _I, _I, _I, _P, _P, _P]),
    "quire_group_gather": (_N, [_P, _I, _P, _I, _P]),
    "quire_group_linear": (_N, [_P, _P, _P, _N, _I, _I, _I, _P, _I, _I, _P, _I, _P, _P, _P]),
    "quire_group_embed": (_N, [_P, _P, _I, _P, _P, _N, _I, _P]),
    "quire_group_pick": (_N, [_P, _P, _I, _I, _P]),
    "quire_link_bytes": (_I, [_I]),
    "quire_link_join": (None, [_P, _N]),
    "quire_link_move": (_N, [_P, _P, _I, _N]),
    "quire_head_logits": (None, [_P, _I, _P, _P, _N, _P, _I, _I, _I]),
    "quire_head_help": (None, [_P, _I, _P, _N, _I, _I]),
    "quire_head_stop": (None, [_P]),
    "quire_draw": (None, [_P] * 9 + [_I, _I]),
    "quire_mask": (None, [_P] * 5 + [_I] * 3),
    "quire_choose": (None, [_P] * 3 + [_I, _I]),
    "quire_rank": (None, [_P] * 7 + [_I, _I, _I]),
    "quire_replay": (_N, [_P, _I, _P, _P]),
    "quire_put_columns": (None, [_P, _P] + [_I] * 4),
    "quire_states_before": (None, [_P, _P, _P, _P, _I, _I, _I, _I, _P]),
    "quire_keep_rows": (None, [_P, _P, _P, _I, _I]),
    "quire_keep_last": (None, [_P, _P, _P, _P, _I, _I, _P]),
    "quire_guess": (None, [_P, _I, _I, _P, _P, _P, _P]),
    "quire_draft_chain": (_I, [_P, _P, _P, _P, _I, _P, _P, _P, _P, _I, _F]),
    "quire_ring_write": (_N, [_P, _P, _U, _N]),
    "quire_ring_wake": (None, [_P]),
    "quire_ring_read": (_U, [_P, _I]),
}
# Raised with every change of a C signature, so that a library left from an older build is refused by name.
ABI_VERSION = 22

opener: type[ctypes.CDLL] = ctypes.CDLL
"""What a library is opened with. Benches put one here that measures its calls."""


def cpu_flags() -> set[str]:
    """What this processor says it can do; empty where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


def supported_variants() -> list[str]:
    """Variants this processor runs, best first."""
    flags = cpu_flags()
    return [name for name in VARIANTS.get(machine(), {}) if _NEEDS.get(name, set()) <= flags]


def load(variant: str | None = None, folder: Path = SOURCE_DIR) -> ctypes.CDLL:
    """Load the best library built for this processor (or the one named), with argument types declared."""
    names = [variant] if variant is not None else supported_variants()
    for name in names:
        path = folder / library_name(name)
        if path.exists():
            return _open(path)
    wanted = ", ".join(library_name(name) for name in names) or f"any library for {machine()}"
    raise KernelBuildError(
        f"Quire's compiled CPU kernels are missing ({wanted} in {folder}): {FIX}, or reinstall Quire"
    )


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = opener(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        version = library.quire_abi_version()
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"{path} cannot be used ({error}): rebuild it, {FIX}") from error
    if version != ABI_VERSION:
        raise KernelBuildError(
            f"{path} is of another version of Quire ({version}, not {ABI_VERSION}): rebuild it, {FIX}"
        )
    return library
