"""Builds a Tokenizer from the files of a Hugging Face folder: tokenizer.json and its companions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelLoadError
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Gemma's and Qwen's are 30 MB and 11 MB; the library needs several times the file's size to read one.
MAX_TOKENIZER_BYTES = 256 << 20
MAX_COMPANION_BYTES = 32 << 20
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, or of the tokenizer.json that `folder` points at itself."""
    path = folder if folder.is_file() else folder / "tokenizer.json"
    folder = path.parent
    if not path.is_file():
        other = next(
            (n for n in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / n).is_file()), None
        )
        hint = (
            f" ({other} alone is not enough: save it with a fast tokenizer of transformers)" if other else ""
        )
        raise ModelLoadError(
            f"{folder} has no tokenizer.json{hint}; pass tokenizer= with a folder that has one, "
            "or skip_tokenizer_init=True to work with token ids"
        )
    config = _companion(folder / "tokenizer_config.json")
    backend = _backend(path)
    special = _special_tokens(config, _companion(folder / "special_tokens_map.json"))
    _add_configured_tokens(backend, config, special)
    _add_configured_bos(backend, config, special)
    return Tokenizer(backend, special_tokens=special, chat_template=_chat_template(folder, config))


def _backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB")
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises plain Exception on what it cannot read
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}") from error
    # A file may be saved with the settings of somebody's batch job.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _companion(path: Path) -> dict[str, Any]:
    """A JSON object beside the tokenizer, {} when there is none."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_COMPANION_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_COMPANION_BYTES >> 20} MiB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} should hold a JSON object, it holds a {type(value).__name__}")
    return value


def _content(token: Any) -> str | None:
    """A token is written as its text or as an object that has it in 'content'."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _special_tokens(*configs: dict[str, Any]) -> dict[str, str]:
    """Role to token text; the first file that names a role wins."""
    found: dict[str, str] = {}
    for config in configs:
        extra = config.get("extra_special_tokens")
        named = {**{role: config.get(role) for role in _ROLES}, **(extra if isinstance(extra, dict) else {})}
        for role, token in named.items():
            text = _content(token)
            if text is not None:
                found.setdefault(role, text)
    return found


def _add_configured_tokens(backend: Backend, config: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json makes special, or adds after tokenizer.json's own."""
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    decoder = config.get("added_tokens_decoder")
    listed = {} if not isinstance(decoder, dict) else decoder
    for key in sorted((k for k in listed if str(k).isdecimal()), key=int):
        entry, text = listed[key], _content(listed[key])
        if text is None or not isinstance(entry, dict) or int(key) in known:
            continue
        if backend.token_to_id(text) not in (None, int(key)):
            raise ModelLoadError(f"tokenizer_config.json gives {text!r} the id {key}, tokenizer.json another")
        flags = {
            name: entry[name] for name in ("lstrip", "rstrip", "normalized", "single_word") if name in entry
        }
        backend.add_tokens([AddedToken(text, special=bool(entry.get("special")), **flags)])
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(special.values()) if text not in marked]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in missing])


def _add_configured_bos(backend: Backend, config: dict[str, Any], special: dict[str, str]) -> None:
    """`add_bos_token` / `add_eos_token` where tokenizer.json itself adds no special tokens."""
    from tokenizers import processors

    first = special.get("bos_token") if config.get("add_bos_token") is True else None
    last = special.get("eos_token") if config.get("add_eos_token") is True else None
    if (first is None and last is None) or backend.num_special_tokens_to_add(is_pair=False):
        return
    used = [(t, backend.token_to_id(t)) for t in dict.fromkeys([first, last]) if t is not None]
    single = [*([first] if first else []), "$A", *([last] if last else [])]
    template = processors.TemplateProcessing(single=single, special_tokens=used)
    before = backend.post_processor
    backend.post_processor = template if before is None else processors.Sequence([before, template])


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja (and more of them in additional_chat_templates/), else tokenizer_config.json's."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        for item in inline:
            if (
                isinstance(item, dict)
                and isinstance(item.get("name"), str)
                and isinstance(item.get("template"), str)
            ):
                templates[item["name"]] = item["template"]
    legacy = _companion(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    files = [("default", folder / "chat_template.jinja")]
    files += [(p.stem, p) for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, path in files:
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return templates or None
