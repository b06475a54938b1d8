"""What all readers of a `quantization_config` share: a field that is not supported is refused by its name, and so is
what would change results whatever the method is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from quire.errors import UnsupportedModelError

FIELD = "quantization_config"
Values = tuple[object, ...]
"""Those that a field may have; None: it may be absent."""
FLAG: Values = (True, False, None)
_STATES: Values = ("compressed", "frozen", None)
_UNSUPPORTED = ("dynamic", "rotation", "adapter", "transform_config")
"""`dynamic`: layers or modules with settings of their own."""
_KV_SCHEME: dict[str, Values] = {"type": ("float",), "num_bits": (8,), "dynamic": (False, None),
                                 "symmetric": (True, None), "strategy": ("tensor", "attn_head", None)}  # fmt: skip


def refuse(field: str, value: object, hint: str = "") -> NoReturn:
    name = f"{FIELD}.{field}" if field else FIELD
    raise UnsupportedModelError(f"config.json: {name}={value!r:.200} is not supported{hint}")


def check_values(stored: Mapping[str, Any], known: Mapping[str, Values], place: str = "") -> None:
    """`place`: where `stored` lies in the config, with a dot at its end."""
    for field, values in known.items():
        value = stored.get(field)
        if not any(type(value) is type(each) and value == each for each in values):
            refuse(place + field, value, f"; known: {', '.join(map(str, values))}")


def group_size(stored: Mapping[str, Any], default: int = 128, place: str = "") -> int | None:
    """Columns that share a scale; None: all of a row."""
    value = stored.get("group_size", default)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 0 < value < 1 << 24):
        refuse(f"{place}group_size", value, "; it is a number of columns, or -1")
    return None if value == -1 else value


def check_extras(stored: Mapping[str, Any]) -> None:
    """Refuses what would change results whatever the method is, and is not supported."""
    for field in _UNSUPPORTED:
        if stored.get(field):
            refuse(field, stored[field])
    sparsity = stored.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        refuse("sparsity_config", sparsity)
    check_values(stored, {"kv_cache_quant_algo": ("FP8", None)})
    _check_kv_scheme(stored)


def _check_kv_scheme(stored: Mapping[str, Any]) -> None:
    """Refuses a `kv_cache_scheme` other than fp8 with scales that the checkpoint brings. A cache in 16 bits needs none
    of them: they count with kv_cache_dtype='fp8'."""
    scheme = stored.get("kv_cache_scheme")
    if scheme is None:
        return
    if not isinstance(scheme, Mapping):
        refuse("kv_cache_scheme", scheme)
    check_values(scheme, _KV_SCHEME, "kv_cache_scheme.")


def check_status(stored: Mapping[str, Any]) -> None:
    """Of compressed-tensors. Its older versions wrote `frozen` into files that they had compressed; where one was not,
    its weights are floats and are refused by their tensors' type."""
    check_values(stored, {"quantization_status": _STATES})


def weight_groups(stored: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Of compressed-tensors: the groups of layers whose weights are quantized, by their places in the config. One that
    asks for nothing is left out."""
    groups = stored.get("config_groups")
    if groups is None:
        return {}
    if not isinstance(groups, Mapping):
        refuse("config_groups", groups)
    found = {}
    for name, group in groups.items():
        place = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            refuse(place, group)
        if isinstance(group.get("weights"), Mapping):
            found[place] = group
            continue
        for field in ("weights", "input_activations", "output_activations"):
            if group.get(field) is not None:
                refuse(f"{place}.{field}", group[field], " in a group without weights: attention is not quantized, nor "
                       "are activations of layers whose weights are floats")  # fmt: skip
    return found


def check_format(stored: Mapping[str, Any], place: str, group: Mapping[str, Any], known: Values, of: str = "") -> None:
    """How a group of compressed-tensors lies in the file, which it says itself, or the config for all groups."""
    prefix, holder = (f"{place}.", group) if group.get("format") else ("", stored)
    if not any(holder.get("format") == each for each in known):
        refuse(f"{prefix}format", holder.get("format"), f"; known{of}: {', '.join(map(str, known))}")


def only_keys_and_values(stored: Any) -> bool:
    """Whether weights are floats, beside scales of keys and values in fp8."""
    if not isinstance(stored, Mapping):
        return False
    scheme, algorithm = stored.get("kv_cache_scheme"), stored.get("kv_cache_quant_algo")
    match stored.get("quant_method"):
        case "compressed-tensors":
            return scheme is not None and not weight_groups(stored)
        case "modelopt":
            return stored.get("quant_algo") is None and not (scheme is None and algorithm is None)
    return False
