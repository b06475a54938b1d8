"""Small real tokenizers of the kinds in use, trained on the spot, for tests of detokenization."""

from __future__ import annotations

import json

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from quire.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Don't stop, can't won't shouldn't!",
    "Grüße aus Köln: Straße, Äpfel, Übung, naïve café, fiancée.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "我能吞下玻璃而不伤身体。今天天气很好，我们去公园吧。",
    "私はガラスを食べられます。それは私を傷つけません。",
    "나는 유리를 먹을 수 있어요. 그래도 아프지 않아요",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. שלום עולם",
    "मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती.",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 🧑🏿‍🚀 ❤️‍🔥 😀😃😄",
    "def f(x):\n\treturn {'a': [1, 2, 3]}  # comment\n\n\n    indented",
    "  leading spaces, a ▁ and a \ufffd literal, trailing spaces   ",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def byte_level() -> Tokenizer:
    """As GPT-2, SmolLM2, Llama 3, Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens(["<tool>", "Größe mit Leerzeichen"])
    return wrap(backend)


def byte_level_in_sequence() -> Tokenizer:
    """Byte-level, but under a decoder whose parts we do not look into."""
    tokenizer = byte_level()
    tokenizer.backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


def sentencepiece(strip: int) -> Tokenizer:
    """BPE over ▁ with byte fallback; `strip` first spaces are dropped (Llama 2: one, Gemma: none)."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=500, show_progress=False, limit_alphabet=60)
    )
    learned = json.loads(trained.to_str())["model"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *BYTES, *learned["vocab"]])}
    merges = [tuple(pair) for pair in learned["merges"]]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", strip, 0)] if strip else []))
    backend.add_special_tokens(SPECIALS)
    return wrap(backend)


def unigram() -> Tokenizer:
    """As T5 or XLNet: Unigram with Metaspace, which drops the spaces of a first token."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return wrap(backend)


def word_piece() -> Tokenizer:
    """As BERT: spaces before every word but the first, and clean-up of punctuation."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIALS, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    return wrap(backend)


def all_kinds() -> dict[str, Tokenizer]:
    return {
        "byte_level": byte_level(),
        "byte_level_in_sequence": byte_level_in_sequence(),
        "llama2": sentencepiece(strip=1),
        "gemma": sentencepiece(strip=0),
        "strips_three": sentencepiece(strip=3),
        "unigram": unigram(),
        "word_piece": word_piece(),
    }
