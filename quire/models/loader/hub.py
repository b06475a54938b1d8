"""Fetches a model repository from a Hugging Face hub, where one can be reached."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.errors import DownloadError, ModelLoadError

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(:[\w.-]+)?")
REPLY_SECONDS = 10.0
FOLDER_FILES = ("*.json", "*.jinja", "*.safetensors")
# Which quantization of a GGUF repository is meant when none is named.
GGUF_PREFERENCE = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "F16", "BF16", "Q5_0", "Q4_1", "Q4_0", "F32")


def looks_like_hub_id(model: str) -> bool:
    return HUB_ID.fullmatch(model) is not None


def choose_gguf(files: Sequence[str], tag: str | None, repo: str) -> str:
    """The GGUF file that `org/name` or `org/name:TAG` means."""
    candidates = sorted(
        name for name in files if name.lower().endswith(".gguf") and "mmproj" not in name.lower()
    )
    wanted = [tag] if tag else list(GGUF_PREFERENCE)
    for quant in wanted:
        ending = re.compile(rf"(^|[-._/]){re.escape(quant)}\.gguf$", re.IGNORECASE)
        for name in candidates:
            if ending.search(name):
                return name
    if len(candidates) == 1 and tag is None:
        return candidates[0]
    raise ModelLoadError(
        f"{repo} has no GGUF file {'tagged ' + tag if tag else 'that can be chosen'}; it has "
        f"{', '.join(candidates[:12]) or 'none'}: name one as {repo}:TAG"
    )


def fetch_from_hub(
    model: str,
    *,
    prefer_gguf: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    endpoint: str | None = None,
) -> Path:
    """A local folder (or .gguf file) of the hub repository `org/name[:TAG]`.

    Interrupted downloads are resumed, and what is in the hub cache already is used without a network when
    the hub cannot be reached.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise DownloadError(
            f"fetching {model} from a hub needs the huggingface_hub package: pip install huggingface_hub"
        ) from None
    repo, _, tag = model.partition(":")
    places: dict[str, Any] = {"repo_id": repo, "cache_dir": cache_dir, "endpoint": endpoint}
    try:
        info = huggingface_hub.HfApi(endpoint=endpoint).model_info(repo, timeout=REPLY_SECONDS)
    except Exception as error:
        cached = _from_cache(places, tag or None, prefer_gguf) if _is_unreachable(error) else None
        if cached is not None:
            return cached
        raise _explain(repo, error) from error
    files = [sibling.rfilename for sibling in info.siblings or []]
    try:
        return _download(places, files, tag or None, prefer_gguf, progress)
    except ModelLoadError:
        raise
    except Exception as error:
        raise _explain(repo, error) from error


def _wants_gguf(files: Sequence[str], tag: str | None, prefer_gguf: bool) -> bool:
    return bool(tag) or prefer_gguf or not any(name.endswith(".safetensors") for name in files)


def _download(
    places: dict[str, Any], files: list[str], tag: str | None, prefer_gguf: bool, progress: bool
) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    # No revision is named, so that the library notes which one "main" is and finds it again offline.
    options = {**places, "etag_timeout": REPLY_SECONDS}
    if any(name.endswith((".safetensors", ".gguf")) for name in files) and _wants_gguf(
        files, tag, prefer_gguf
    ):
        return Path(hf_hub_download(filename=choose_gguf(files, tag, places["repo_id"]), **options))
    return Path(snapshot_download(allow_patterns=list(FOLDER_FILES), ignore_patterns=["*/*"], **options))


def _from_cache(places: dict[str, Any], tag: str | None, prefer_gguf: bool) -> Path | None:
    """What an earlier download left, when it left enough to load a model."""
    from huggingface_hub.constants import HF_HUB_CACHE

    # The library's documented layout. Its own offline lookup refuses a snapshot that lacks files of the
    # repository, which ours always does.
    repo = Path(places["cache_dir"] or HF_HUB_CACHE) / f"models--{places['repo_id'].replace('/', '--')}"
    try:
        folder = repo / "snapshots" / (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    if _wants_gguf(files, tag, prefer_gguf):
        try:
            return folder / choose_gguf(files, tag, places["repo_id"])
        except ModelLoadError:
            return None
    return folder if (folder / "config.json").is_file() else None


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_unreachable(error: BaseException) -> bool:
    status = _status(error)
    return status is None or status >= 500


def _explain(repo: str, error: BaseException) -> DownloadError:
    status = _status(error)
    if status in (401, 403):
        return DownloadError(
            f"the hub refuses access to {repo}: it does not exist, or is private or gated. Check the name, "
            "accept its terms on the hub's page, and log in with `hf auth login`"
        )
    if status == 404:
        return DownloadError(f"the hub has no repository {repo} (or a file of it is gone); check the name")
    if isinstance(error, OSError) and error.errno is not None and "space" in str(error):
        return DownloadError(
            f"the disk filled up while {repo} was fetched; free some, or choose another cache_dir"
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return DownloadError(
        f"cannot fetch {repo} from the hub ({reason}). Check the network (or the proxy, or HF_ENDPOINT for a "
        f"mirror); or download it elsewhere with `hf download {repo} --local-dir FOLDER` and pass the folder"
    )
