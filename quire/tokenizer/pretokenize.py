"""How byte-level vocabularies cut text into words before merging, by the name GGUF files give each rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """Regular expressions applied one after the other, each isolating its matches in the pieces so far."""

    patterns: tuple[str, ...] = ()
    ignore_merges: bool = False
    """A word that is a token stays whole, even where no chain of merges makes it."""
    add_bos: bool = False
    nfc: bool = False
    raw_text: bool = False
    """Merges run over characters rather than over bytes."""

    def build(self, byte_level: bool) -> PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, contraction: str = f"{_CONTRACTION}|") -> str:
    """GPT-4's way: words with one leading mark, numbers in groups, marks with the newlines after them."""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased_words(contraction: str, digits: str, after_marks: str = r"\r\n/", but: str = "") -> str:
    """GPT-4o's: as above, and a change from lower to upper case starts a new word. `but` are no letters of words."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{after_marks}]*|{_TAIL}"
    )


_KIMI = r"\p{Han}+|" + _cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}", r"\r\n", r"&&[^\p{Han}]")
"""GPT-4o's, with Chinese characters by themselves."""


_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)


def _characters(ranges: str) -> str:
    """The inside of a character class from hexadecimal code points and ranges of them."""
    return "".join("-".join(rf"\x{{{int(end, 16):X}}}" for end in part.split("-")) for part in ranges.split())


# Letters of the scripts that have upper and lower case.
_LATIN_LIKE = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A "
    "38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF "
    "1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D "
    "1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
    "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F "
    "2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F "
    "A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)

_LLAMA3 = PreTokenizerRule((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizerRule((_words(r"\p{N}"),), nfc=True)
_PLAIN = PreTokenizerRule((_GPT2,))
_DIGITS = PreTokenizerRule((r"\p{N}", _GPT2))
_GPT4 = PreTokenizerRule((_words(r"\p{N}{1,3}"),))
_BLOOM = PreTokenizerRule((r" ?[^(\s|.,!?…。，、।۔،)]+",))
_DEEPSEEK_V3 = PreTokenizerRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_GPT4O = PreTokenizerRule((_cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}"),))

RULES: dict[str, PreTokenizerRule] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _PLAIN),
    **dict.fromkeys(
        ("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "gigachat"), _PLAIN
    ),
    **dict.fromkeys(("modern-bert", "exaone4"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "kormo", "grok-2"), replace(_QWEN2, nfc=False)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _GPT4),
    **dict.fromkeys(("chatglm-bpe", "glm4"), replace(_GPT4, ignore_merges=True)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "viking": replace(_BLOOM, patterns=(*_BLOOM.patterns, r"\p{N}")),
    "kimi-k2": PreTokenizerRule((_KIMI,), ignore_merges=True),
    "tekken": PreTokenizerRule((_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "qwen35": PreTokenizerRule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",
        )
    ),
    "seed-coder": PreTokenizerRule(
        (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",)
    ),
    "deepseek-llm": PreTokenizerRule(
        (
            r"[\r\n]",
            rf"\s?[{_LATIN_LIKE}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizerRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "falcon": PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gemma4": PreTokenizerRule(raw_text=True, add_bos=True),
}


def rule_named(name: str) -> PreTokenizerRule:
    """The rule of that name; an unknown one is refused, since a guess would change what the model reads."""
    rule = RULES.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"the GGUF tokenizer cuts text by the rule {name!r}, which Quire does not know; "
            "pass tokenizer= with a folder that has the model's tokenizer.json"
        )
    return rule
