"""resolve_model: from what a person calls a model to its config, weights and tokenizer."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from quire.errors import ConfigError, ModelLoadError
from quire.models.loader import mxfp4, safetensors
from quire.models.loader.catalog import CATALOG
from quire.models.loader.fp8_config import fp8_scheme
from quire.models.loader.gguf import GgufFile, GgufTensor
from quire.models.loader.gguf_names import architecture_of, hf_config, hf_name, is_extra
from quire.models.loader.gguf_quants import MXFP4
from quire.models.loader.gguf_rope import CONFIG_TENSORS
from quire.models.loader.hub import fetch_from_hub, looks_like_hub_id
from quire.models.loader.json_file import read_json_object
from quire.models.loader.latent_halves import join, joined, whole_of
from quire.models.loader.pull import pull
from quire.models.loader.quantization_config import integer_scheme
from quire.models.loader.quantization_files import with_quantization
from quire.models.loader.stored_forms import StoredForm, folder_forms, gguf_form
from quire.models.stored_parts import NOTHING, Ranges, StoredParts, take
from quire.tokenizer.from_folder import has_tokenizer, tokenizer_from_folder
from quire.tokenizer.from_gguf import tokenizer_from_gguf
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:  # saying what a model is must not cost the import of torch
    import torch

    from quire.kernels.quantized import CodedWeight
    from quire.models.loader.gguf_rows import GgufRows

LOAD_FORMATS = ("auto", "gguf", "safetensors", "dummy")
# Tensors being dequantized ahead of the one that is handed out, and threads that do it. Numpy lets go of the
# interpreter lock, so that two halve the time of a load; more tensors ahead would only cost memory.
READ_AHEAD = 2
READ_THREADS = 2
Read = TypeVar("Read")
Made = TypeVar("Made")


class Once(Generic[Made]):
    """Something that is made when it is first asked for; threads that ask meanwhile wait for it."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: Made | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Made:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def start(self) -> None:
        """Make it in a thread. Who asks for it gets the error, if there is one."""

        def run() -> None:
            with contextlib.suppress(Exception):
                self()

        threading.Thread(target=run, name="quire-tokenizer", daemon=True).start()


class ModelSource(ABC):
    """A model found on this machine: what it is, and how to get at its parts, read when asked for."""

    def __init__(self, name: str, path: Path, tokenizer_path: Path | None, dummy: bool) -> None:
        self.name = name
        self.path = path
        self.is_dummy = dummy
        self._own_tokenizer = Once(self._make_tokenizer)
        self._tokenizer = Once(lambda: load_tokenizer(tokenizer_path)) if tokenizer_path else self._own_tokenizer

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """A Hugging Face style config, whatever the file's format."""

    @property
    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """Defaults for generation: eos_token_id (a list), and what generation_config.json says."""

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files that hold its weights, in a fixed order."""

    @property
    @abstractmethod
    def stores_integers(self) -> bool:
        """Whether matrices of the file are integers with scales."""

    @property
    @abstractmethod
    def stores_codes(self) -> bool:
        """Whether matrices of the file are integers, fp8 or MXFP4 with scales."""

    @abstractmethod
    def stored_forms(self) -> dict[str, StoredForm]:
        """How each quantized weight is stored, by its name without `.weight`, from headers alone."""

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """Of what its files hold, as Hugging Face spells them; none of a dummy."""

    @abstractmethod
    def _weights(
        self, dtype: torch.dtype | None, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def _stored_weights(
        self, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]: ...

    @abstractmethod
    def _unread_weights(
        self, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]: ...

    @abstractmethod
    def _make_tokenizer(self) -> Tokenizer:
        """The one that the model brings with it."""

    def weights(
        self, dtype: torch.dtype | Literal["float32"] | None = "float32", parts: StoredParts | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) one after the other; each is the caller's, to keep or to change.

        `dtype` None keeps what the file stores (float32 for a quantized one). With `parts` nothing else is read.
        """
        import torch

        self._check_readable()
        return self._weights(torch.float32 if dtype == "float32" else dtype, parts)

    def stored_weights(
        self, parts: StoredParts | None = None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]:
        """As `weights(None)`, but matrices that the file keeps as codes and scales come as these."""
        self._check_readable()
        return self._stored_weights(parts)

    def unread_weights(
        self, parts: StoredParts | None = None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]:
        """As `stored_weights`, but large matrices stay in their file until their rows are asked for."""
        self._check_readable()
        return self._unread_weights(parts)

    def _check_readable(self) -> None:
        if self.is_dummy:
            raise ModelLoadError(
                f"{self.name} was opened with load_format='dummy': it has no weights to read"
            )

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (or the one asked for instead); ModelLoadError where there is none."""
        return self._tokenizer()

    def start_tokenizer(self) -> None:
        """Make the tokenizer in a thread, beside what the caller goes on with: reading the weights, say."""
        self._tokenizer.start()

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return _as_ids(self.generation_config.get("eos_token_id"))


def _as_ids(value: Any) -> tuple[int, ...]:
    values = [v for v in (value if isinstance(value, list | tuple) else [value]) if v is not None]
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int)]
    if wrong:
        raise ModelLoadError(f"eos_token_id must be an integer or a list of them, not {wrong[0]!r:.80}")
    return tuple(dict.fromkeys(values))


class GgufSource(ModelSource):
    """A model in one GGUF file."""

    def __init__(
        self, name: str, path: Path, tokenizer_path: Path | None = None, dummy: bool = False
    ) -> None:
        super().__init__(name, path, tokenizer_path, dummy)
        self._file = GgufFile(path)
        self._arch = architecture_of(self._file)[1]
        self._config = hf_config(self._file)
        self._has_vocabulary = "tokenizer.ggml.tokens" in self._file.metadata

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    def _make_tokenizer(self) -> Tokenizer:
        made = tokenizer_from_gguf(self._file.metadata, str(self.path))
        self._file.forget_vocabulary()
        return made

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        named = {
            key: self._config[key]
            for key in ("bos_token_id", "pad_token_id")
            if self._config[key] is not None
        }
        eos = self._own_tokenizer().eos_token_ids if self._has_vocabulary else _as_ids(self._config["eos_token_id"])
        return {**named, "eos_token_id": list(eos)}

    def weight_files(self) -> list[Path]:
        return [self.path]

    @property
    def stores_integers(self) -> bool:
        return not self.is_dummy and any(tensor.format.coding is not None for tensor in self._file.tensors.values())

    @property
    def stores_codes(self) -> bool:
        mxfp4 = not self.is_dummy and any(tensor.format.name == MXFP4 for tensor in self._file.tensors.values())
        return mxfp4 or self.stores_integers

    def stored_forms(self) -> dict[str, StoredForm]:
        wanted = () if self.is_dummy else self._wanted(None)
        named = [(name, gguf_form(tensor.format, len(tensor.shape))) for name, tensor, _ in wanted]
        return {name.removesuffix(".weight"): form for name, form in named if form is not None}

    def tensor_names(self) -> list[str]:
        return [] if self.is_dummy else [name for name, _, _ in self._wanted(None)]

    def _read(
        self, tensor: GgufTensor, name: str, dtype: torch.dtype | None, ranges: Ranges | None
    ) -> torch.Tensor:
        """`ranges` are those of the tensor as Hugging Face stores it; heads are never cut apart."""
        import torch

        turned = self._arch.is_transposed(name)
        if ranges is None:
            values = torch.empty(tensor.shape, dtype=torch.float32)
            self._file.read(tensor, values.view(-1).numpy())
        else:
            dim, runs = ranges
            dim = 1 - dim if turned else dim
            pieces = [torch.from_numpy(self._file.read_range(tensor, dim, *run)) for run in runs]
            values = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        values = self._arch.undo(name, values.t() if turned else values, self._config)
        return values if dtype is None else values.to(dtype)

    def _read_stored(
        self, tensor: GgufTensor, name: str, ranges: Ranges | None, leave: bool = False
    ) -> torch.Tensor | CodedWeight:
        """As `_read`, in the file's own bits where it is a quantized matrix that is not cut inside a group. All experts
        of a layer, or a rank's run of them: in codes their rows lie one below the other. `leave`: a large matrix stays
        in the file. (Of blocks that are cut nobody knows, before all are read, how few bytes hold every scale.)"""
        import torch

        from quire.kernels.quantized import Mxfp4Weight
        from quire.kernels.unread import LARGE

        part = self._matrix(tensor, name, ranges)
        if part is not None and leave and math.prod(part.shape) >= LARGE and not part.cuts_blocks:
            return part.unread()
        if part is not None and tensor.format.name == MXFP4 and len(tensor.shape) == 3:
            codes, scales = self._file.read_mxfp4(part.tensor, *part.rows[0])
            return Mxfp4Weight(torch.from_numpy(codes), torch.from_numpy(scales))
        if part is None or tensor.format.coding is None or part.cuts_groups:
            return self._read(tensor, name, None, ranges)
        return part.codes(0, part.shape[0])

    def _matrix(self, tensor: GgufTensor, name: str, ranges: Ranges | None) -> GgufRows | None:
        """The wanted part of a matrix, or of all experts' rows; None of what is none, or is stored turned."""
        import torch

        from quire.models.loader.gguf_rows import GgufRows

        if len(tensor.shape) not in (2, 3) or self._arch.is_transposed(name):
            return None
        dim, runs = ranges or (0, ((0, tensor.shape[0]),))
        if len(tensor.shape) == 3:
            experts, each, width = tensor.shape
            tensor = replace(tensor, shape=(experts * each, width))
            runs = tuple((start * each, stop * each) for start, stop in runs)
        rows, columns = ((0, tensor.shape[0]),) if dim else runs, runs if dim else ((0, tensor.shape[1]),)
        # The converters' changes to matrices are orders of rows, so that row numbers show them.
        numbers = torch.arange(sum(stop - start for start, stop in rows)).unsqueeze(1)
        order = self._arch.undo(name, numbers, self._config)
        return GgufRows(self._file, tensor, rows, columns, None if order is numbers else order.squeeze(1))

    def _wanted(self, parts: StoredParts | None) -> Iterator[tuple[str, GgufTensor, Ranges | None]]:
        layers = int(self._config.get("num_hidden_layers") or self._config["n_layer"])
        tensors = [tensor for name, tensor in self._file.tensors.items() if name not in CONFIG_TENSORS]
        for tensor in safetensors.tables_first(tensors, lambda tensor: tensor.name):
            if is_extra(tensor.name, self._config):
                continue
            name = hf_name(tensor.name, self._arch, layers)
            whole = whole_of(name)
            if whole is not None:
                if parts is None or parts.wants(whole):
                    yield name, tensor, None  # cut when both halves are there
                continue
            shape = tensor.shape[::-1] if self._arch.is_transposed(name) else tensor.shape
            ranges = None if parts is None else parts.ranges(name, shape)
            if ranges != NOTHING:
                yield name, tensor, ranges

    def _weights(
        self, dtype: torch.dtype | None, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        read = self._read_ahead(lambda tensor, name, ranges: self._read(tensor, name, dtype, ranges), parts)
        return joined(read, lambda name, keys, values: _cut(join(keys, values, name), name, parts))

    def _stored_weights(
        self, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]:
        return self._with_latents(self._read_stored, parts)

    def _unread_weights(
        self, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]:
        return self._with_latents(partial(self._read_stored, leave=True), parts)

    def _with_latents(
        self, read: Callable[[GgufTensor, str, Ranges | None], torch.Tensor | CodedWeight], parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]:
        return joined(self._read_ahead(read, parts), lambda name, keys, values: _cut(
            join(_floats(keys), _floats(values), name), name, parts))  # fmt: skip

    def _read_ahead(
        self, read: Callable[[GgufTensor, str, Ranges | None], Read], parts: StoredParts | None
    ) -> Iterator[tuple[str, Read]]:
        wanted = list(self._wanted(parts))
        pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="quire-load")
        ahead: deque[tuple[str, Future[Read]]] = deque()
        try:
            for name, tensor, ranges in wanted:
                ahead.append((name, pool.submit(read, tensor, name, ranges)))
                if len(ahead) > READ_AHEAD:
                    ready, future = ahead.popleft()
                    yield ready, future.result()
            while ahead:
                ready, future = ahead.popleft()
                yield ready, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _floats(weight: torch.Tensor | CodedWeight) -> torch.Tensor:
    from quire.kernels.quantized import CodedWeight

    return weight.dequantized() if isinstance(weight, CodedWeight) else weight


def _cut(tensor: torch.Tensor, name: str, parts: StoredParts | None) -> torch.Tensor:
    """A rank's part of a tensor that was put together."""
    ranges = None if parts is None else parts.ranges(name, tuple(tensor.shape))
    return tensor if ranges is None else take(tensor, ranges)


class FolderSource(ModelSource):
    """A model in a Hugging Face folder."""

    def __init__(
        self, name: str, path: Path, tokenizer_path: Path | None = None, dummy: bool = False
    ) -> None:
        super().__init__(name, path, tokenizer_path, dummy)
        self._config = with_quantization(read_json_object(path / "config.json"), path)
        architectures = self._config.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise ModelLoadError(f"{path / 'config.json'} does not say the model's 'architectures'")
        if not dummy:
            safetensors.weight_files(path)  # a missing shard is found before anything is allocated

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    def _make_tokenizer(self) -> Tokenizer:
        return tokenizer_from_folder(self.path)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        path = self.path / "generation_config.json"
        stored = read_json_object(path) if path.is_file() else {}
        ids = list(_as_ids(stored.get("eos_token_id")) or _as_ids(self._text_config().get("eos_token_id")))
        if has_tokenizer(self.path):
            ids += [i for i in self._own_tokenizer().eos_token_ids if i not in ids]
        return {**stored, "eos_token_id": ids}

    def _text_config(self) -> dict[str, Any]:
        inner = self._config.get("text_config")
        return {**self._config, **inner} if isinstance(inner, dict) else self._config

    def weight_files(self) -> list[Path]:
        return safetensors.weight_files(self.path)

    @property
    def stores_integers(self) -> bool:
        return not self.is_dummy and integer_scheme(self._config) is not None

    @property
    def stores_codes(self) -> bool:
        fp8 = fp8_scheme(self._config) is not None
        return self.stores_integers or (not self.is_dummy and (fp8 or self._is_mxfp4))

    def stored_forms(self) -> dict[str, StoredForm]:
        return {} if self.is_dummy else folder_forms(self.path, self._config)

    def tensor_names(self) -> list[str]:
        return [] if self.is_dummy else safetensors.tensor_names(self.path)

    def _weights(
        self, dtype: torch.dtype | None, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        coded = self._coded_weights(parts)
        if coded is not None:
            return _dequantized(coded, dtype)
        if self._is_mxfp4:
            return mxfp4.joined(self._mxfp4_tensors(dtype, parts))
        return safetensors.iterate_weights(self.path, dtype, None if parts is None else parts.ranges)

    @property
    def _is_mxfp4(self) -> bool:
        quantization = self._config.get("quantization_config")
        return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"

    def _mxfp4_tensors(
        self, dtype: torch.dtype | None, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return safetensors.iterate_weights(self.path, dtype, self._mxfp4_ranges(parts))

    def _mxfp4_ranges(self, parts: StoredParts | None) -> safetensors.RangesOf | None:
        """Blocks and scales are cut as the weight is whose parts they are: by experts."""
        return None if parts is None else lambda name, shape: parts.ranges(mxfp4.stem(name), shape)

    def _stored_weights(
        self, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]:
        if self._is_mxfp4:
            return mxfp4.joined_codes(self._mxfp4_tensors(None, parts))
        return self._coded_weights(parts) or self._weights(None, parts)

    def _unread_weights(
        self, parts: StoredParts | None
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]]:
        if self._is_mxfp4:
            return mxfp4.joined_codes(
                safetensors.iterate_unread(self.path, self._mxfp4_ranges(parts), codes=mxfp4.is_part))
        coded = self._coded_weights(parts, unread=True)
        return coded or safetensors.iterate_unread(self.path, None if parts is None else parts.ranges)

    def _coded_weights(
        self, parts: StoredParts | None, unread: bool = False
    ) -> Iterator[tuple[str, torch.Tensor | CodedWeight]] | None:
        """Where the checkpoint stores its weights as codes and scales; None: as floats, or MXFP4."""
        integers, fp8 = integer_scheme(self._config), fp8_scheme(self._config)
        if integers is not None:
            from quire.models.loader.integer_weights import read

            return read(self.path, integers, parts, unread)
        if fp8 is not None:
            from quire.models.loader.fp8_weights import read as read_fp8

            return read_fp8(self.path, fp8, parts, unread)
        return None


def _dequantized(
    coded: Iterator[tuple[str, torch.Tensor | CodedWeight]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    from quire.kernels.quantized import CodedWeight

    for name, weight in coded:
        values = weight.dequantized() if isinstance(weight, CodedWeight) else weight
        yield name, values if dtype is None else values.to(dtype)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, of a folder, or of a tokenizer.json."""
    if path.is_file() and path.suffix.lower() == ".gguf":
        with GgufFile(path) as file:
            return tokenizer_from_gguf(file.metadata, str(path))
    return tokenizer_from_folder(path)


def locate(
    model: str, *, cache_dir: str | os.PathLike[str] | None, progress: bool, prefer_gguf: bool = False
) -> Path:
    """The .gguf file or the folder that a name stands for, fetched if it must be."""
    path = Path(model).expanduser()
    if model in CATALOG and not path.exists():
        return pull(model, cache_dir=cache_dir, progress=progress)
    if path.exists():
        return path
    if looks_like_hub_id(model) and not model.lower().endswith(".gguf"):
        hub_cache = None if cache_dir is None else Path(cache_dir).expanduser() / "hub"
        return fetch_from_hub(model, prefer_gguf=prefer_gguf, cache_dir=hub_cache, progress=progress)
    raise ModelLoadError(
        f"there is no model {model!r}: no file or folder has that path, and it is none of the aliases "
        f"{', '.join(CATALOG)} nor a hub id of the form org/name"
    )


def _gguf_in(path: Path, load_format: str) -> Path | None:
    """The GGUF file to read, or None when `path` is a Hugging Face folder."""
    if path.is_file():
        if load_format == "safetensors":
            raise ModelLoadError(
                f"{path} is a file; load_format='safetensors' needs a folder with config.json"
            )
        return path
    if load_format == "safetensors" or (load_format != "gguf" and (path / "config.json").is_file()):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if load_format == "gguf" or files:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelLoadError(f"{path} should have one .gguf file, it has {found}; pass the path of one")
    return None


def resolve_model(
    model: str,
    *,
    tokenizer: str | None = None,
    load_format: str = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> ModelSource:
    """Find a model by alias, path or hub id, fetching it if it must be, and read what it says about itself.

    `tokenizer` names another model, folder, tokenizer.json or .gguf to take the tokenizer from.
    `load_format` "auto" goes by the files; "dummy" needs a config only, and gives a source without weights.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {load_format!r}", "load_format"
        )
    if not isinstance(model, str) or not model or "\0" in model:
        raise ConfigError(f"model must be an alias, a path or a hub id, not {model!r}", "model")
    path = locate(model, cache_dir=cache_dir, progress=progress, prefer_gguf=load_format == "gguf")
    tokenizer_path = None if tokenizer is None else locate(tokenizer, cache_dir=cache_dir, progress=progress)
    gguf = _gguf_in(path, load_format)
    dummy = load_format == "dummy"
    name = model if model in CATALOG else path.name
    if gguf is not None:
        return GgufSource(name, gguf, tokenizer_path, dummy)
    return FolderSource(name, path, tokenizer_path, dummy)
