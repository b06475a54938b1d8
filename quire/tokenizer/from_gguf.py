"""Builds a Tokenizer from the vocabulary that a GGUF file carries in its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.tokenizer.pretokenize import PreTokenizerRule, rule_named
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Metadata = Mapping[str, Any]

# Token types of the format.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "▁"
KEY = "tokenizer.ggml"
# Control tokens that end a turn; in a file that names only the end of a text they must stop a chat as well.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|eom_id|>")


class _Vocabulary:
    """The metadata's arrays, checked."""

    def __init__(self, metadata: Metadata, where: str) -> None:
        self.metadata = metadata
        self.where = where
        self.tokens: list[str] = _distinct(self._strings("tokens"))
        count = len(self.tokens)
        if count == 0:
            raise self.fail("it has no tokens")
        self.types = self._numbers("token_type", count, default=1)
        self.pre = self.text("pre", "default")
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def fail(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: its tokenizer cannot be used: {reason}")

    def _strings(self, name: str) -> list[str]:
        value = self.metadata.get(f"{KEY}.{name}")
        if not isinstance(value, list):
            raise self.fail(
                f"{KEY}.{name} is missing or no list of texts; pass tokenizer= with a folder that has one"
            )
        return value

    def _numbers(self, name: str, count: int, default: float) -> list[Any]:
        value = self.metadata.get(f"{KEY}.{name}")
        if value is None:
            return [default] * count
        if not hasattr(value, "tolist") or len(value) != count:
            raise self.fail(f"{KEY}.{name} should list {count} numbers")
        numbers: list[Any] = value.tolist()
        return numbers

    def scores(self) -> list[float]:
        return self._numbers("scores", len(self.tokens), default=0.0)

    def merges(self) -> list[tuple[str, str]]:
        """Pairs of pieces in the order of their rank, without those that join to nothing."""
        ids = self.ids
        pairs = [merge.partition(" ") for merge in self._strings("merges")]
        return [(a, b) for a, _, b in pairs if a in ids and b in ids and a + b in ids]

    def text(self, name: str, default: str) -> str:
        value = self.metadata.get(f"{KEY}.{name}", default)
        if not isinstance(value, str):
            raise self.fail(f"{KEY}.{name} should be text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"{KEY}.{name}", default))

    def special_id(self, name: str) -> int | None:
        value = self.metadata.get(f"{KEY}.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.fail(
                f"{KEY}.{name}_token_id is {value!r}, the vocabulary has {len(self.tokens)} tokens"
            )
        return value


def _distinct(tokens: Sequence[str]) -> list[str]:
    """The same tokens with repeated ones renamed, so that every id keeps a token of its own."""
    seen: set[str] = set()
    out = []
    for index, token in enumerate(tokens):
        if token in seen or token == "":
            token = f"[duplicate-{index}]"
        seen.add(token)
        out.append(token)
    return out


def tokenizer_from_gguf(metadata: Metadata, where: str = "GGUF file") -> Tokenizer:
    """The tokenizer of a GGUF file, from its metadata alone."""
    vocabulary = _Vocabulary(metadata, where)
    model = vocabulary.text("model", "")
    builder = _BUILDERS.get(model)
    if builder is None:
        raise UnsupportedModelError(
            f"{where}: tokenizer model {model!r} is not supported (known: {', '.join(_BUILDERS)}); "
            "pass tokenizer= with a folder that has a tokenizer.json"
        )
    try:
        backend, add_bos, add_eos = builder(vocabulary)
        _add_special_tokens(backend, vocabulary)
        _add_post_processor(backend, vocabulary, add_bos, add_eos)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises plain Exception on vocabularies that contradict themselves
        raise vocabulary.fail(str(error)) from error
    templates = _chat_templates(metadata)
    return Tokenizer(
        backend,
        special_tokens=_special_names(vocabulary),
        eos_token_ids=_eos_ids(vocabulary, templates),
        chat_template=templates or None,
    )


def _byte_level_bpe(vocabulary: _Vocabulary) -> tuple[Backend, bool, bool]:
    """GPT-2 style: regular expressions cut the text, bytes are spelt as printable characters and merged."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    rule: PreTokenizerRule = rule_named(vocabulary.pre)
    if rule.raw_text:
        return _raw_bpe(vocabulary)
    model = models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=rule.ignore_merges)
    backend = Backend(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build(byte_level=True)
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos, False


def _raw_bpe(vocabulary: _Vocabulary) -> tuple[Backend, bool, bool]:
    """Gemma 4 style: merges over raw characters with spaces spelt '▁', single bytes as a last resort."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    unknown = vocabulary.special_id("unknown")
    model = models.BPE(
        vocabulary.ids,
        vocabulary.merges(),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=False,
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend, True, False


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Backend, bool, bool]:
    """SentencePiece BPE: the pair that joins to the best-scored piece goes first, whatever its parts."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    unknown = vocabulary.special_id("unknown")
    model = models.BPE(
        vocabulary.ids,
        _merges_by_score(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend, True, False


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to split a piece in two other pieces, best piece first. Pairs are of the vocabulary's own strings: half
    a million of them would be 50 MB more."""
    ids, tokens, skipped = vocabulary.ids, vocabulary.tokens, {UNKNOWN, CONTROL}
    scores, types = vocabulary.scores(), vocabulary.types
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    merges: list[tuple[str, str]] = []
    for index in order:
        piece = tokens[index]
        if len(piece) < 2 or types[index] in skipped:
            continue
        cuts = range(1, len(piece))
        pairs = [(left, right) for cut in cuts if (left := ids.get(piece[:cut])) is not None
                 and (right := ids.get(piece[cut:])) is not None]
        if len(pairs) > 1:
            pairs.sort()
        merges += [(tokens[left], tokens[right]) for left, right in pairs]
    return merges


def _wordpiece(vocabulary: _Vocabulary) -> tuple[Backend, bool, bool]:
    """BERT style. The file marks the start of a word with '▁', the library its continuation with '##'."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    special = {UNKNOWN, CONTROL}
    names = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        bare = token[1:] if token.startswith(SPACE) else f"##{token}"
        names.append(token if kind in special or (token.startswith("[") and token.endswith("]")) else bare)
    vocabulary.tokens = _distinct(names)
    vocabulary.ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.special_id("unknown")
    backend = Backend(models.WordPiece(vocabulary.ids, unk_token=vocabulary.tokens[unknown or 0]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend, True, True


_BUILDERS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece, "gemma4": _raw_bpe, "bert": _wordpiece}


def _add_special_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones are matched whole in the text but are part of it."""
    from tokenizers import AddedToken

    control, defined = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(control)
    backend.add_tokens(defined)


def _add_post_processor(backend: Backend, vocabulary: _Vocabulary, add_bos: bool, add_eos: bool) -> None:
    from tokenizers import processors

    start = vocabulary.special_id("bos")
    end = vocabulary.special_id("eos")
    if vocabulary.text("model", "") == "bert":
        start, end = vocabulary.special_id("cls") or start, vocabulary.special_id("seperator") or end
    first = [start] if start is not None and vocabulary.flag("add_bos_token", add_bos) else []
    last = [end] if end is not None and vocabulary.flag("add_eos_token", add_eos) else []
    if not first and not last:
        return
    template = [*(vocabulary.tokens[i] for i in first), "$A", *(vocabulary.tokens[i] for i in last)]
    used = [(vocabulary.tokens[i], i) for i in dict.fromkeys([*first, *last])]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)


def _special_names(vocabulary: _Vocabulary) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {ours: vocabulary.special_id(theirs) for theirs, ours in names.items()}
    return {ours: vocabulary.tokens[index] for ours, index in found.items() if index is not None}


def _eos_ids(vocabulary: _Vocabulary, templates: Mapping[str, str]) -> list[int]:
    """Ids that end an answer: those the file names, and the end-of-turn token its chat template writes."""
    named = [vocabulary.special_id(name) for name in ("eos", "eot", "eom")]
    written = [
        vocabulary.ids[token]
        for token in END_OF_TURN
        if token in vocabulary.ids
        and vocabulary.types[vocabulary.ids[token]] in (CONTROL, USER_DEFINED)
        and any(token in template for template in templates.values())
    ]
    return list(dict.fromkeys([index for index in named if index is not None] + written))


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    templates = {}
    main = metadata.get("tokenizer.chat_template")
    if isinstance(main, str):
        templates["default"] = main
    names = metadata.get("tokenizer.chat_templates")
    for name in names if isinstance(names, list) else []:
        text = metadata.get(f"tokenizer.chat_template.{name}")
        if isinstance(text, str):
            templates[name] = text
    return templates
