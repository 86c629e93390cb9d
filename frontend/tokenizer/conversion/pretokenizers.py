"""Regular expressions that split text into words for byte-level BPE, by their names in `tokenizer.ggml.pre`.

A GGUF file names the scheme but does not contain it. The expressions come from the original tokenizers. If a scheme has
several, each is applied to the text that the previous ones did not match.
"""

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_NOT_HAN = r"&&[^\p{Han}]"


def _cl100k(digits: str, letters: str = r"\p{L}+", others: str = _PUNCTUATION) -> str:
    return rf"{_CONTRACTION}|{_LEAD}{letters}|{digits}|{others}|{_SPACES}"


def _cased_words(contraction: str, excluded: str = "") -> str:
    upper, lower = f"[{_UPPER}{excluded}]", f"[{_LOWER}{excluded}]"
    return f"{_LEAD}{upper}*{lower}+{contraction}|{_LEAD}{upper}+{lower}*{contraction}"


def _o200k(digits: str, contraction: str) -> str:
    return rf"{_cased_words(contraction)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_O200K = _o200k(r"\p{N}{1,3}", _CONTRACTION + "?")
_KIMI_K2 = (
    rf"\p{{Han}}+|{_cased_words(_CONTRACTION + '?', _NOT_HAN)}|\p{{N}}{{1,3}}"
    rf"|{_PUNCTUATION}|{_SPACES}"
)
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_HANGUL = r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
_CJK_MARKS = r"[！…“”‘’—：；，\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_EAST_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{0E40}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
# Letters that have case, except the styled alphabets of mathematics.
_CASED_LETTERS = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1D400}-\x{1D7FF}]]+"
_CJK = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_ASCII_SYMBOL = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The word-splitting rules of a tokenizer."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """True if a word that is in the vocabulary is always one token, regardless of the merges."""
    add_bos: bool = False
    """True if prompts begin with the BOS token when the file does not contain this setting."""
    nfc: bool = False
    """True if text is converted to Unicode normal form C before it is split."""


_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_WORDS_OR_SYMBOLS = (
    rf"{_ASCII_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK_WORDS = rf"{_WORDS_OR_SYMBOLS}[\r\n]*|{_SPACES}"
_SPARK_WORDS = rf"{_WORDS_OR_SYMBOLS}|[\r\n]|\s+(?!\S)|\s+"
_LLAMA3_LIKE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        _HAN_AND_KANA,
        _DEEPSEEK_WORDS,
    )
)
_AFMOE = PreTokenizer(
    (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _EAST_ASIAN, _DEEPSEEK_WORDS),
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = (
    rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+"
    rf"|{_JAIS2_SPACES}|\s{{1,2}}(?!\S)|\s"
)
_YOUTU = PreTokenizer(
    (
        rf"{_HANGUL}|{_CJK_MARKS}|[\x{{3105}}-\x{{312F}}]+|{_HAN_AND_KANA}",
        _o200k(r"\p{N}", _CONTRACTION + "?"),
    ),
    ignore_merges=True,
)
_SENTENCES = PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",))
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

_SCHEMES: dict[PreTokenizer, str] = {
    _PLAIN_GPT2: (
        "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling "
        "modern-bert roberta-bpe jina-v2-code jina-v2-de jina-v2-es jina-v1-en jina-es jina-de"
    ),
    _DIGITS_THEN_GPT2: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    _LLAMA3_LIKE: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    PreTokenizer((_QWEN2,), nfc=True): "qwen2",
    PreTokenizer(
        (_QWEN2,)
    ): "stablelm2 deepseek-r1-qwen megrez hunyuan grok-2 solar-open kormo f2llmv2",
    PreTokenizer(
        (_cl100k(r"\p{N}", r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True
    ): "qwen35",
    PreTokenizer((_cl100k(r"\p{N}", others=r" ?[^\s\p{L}\p{N}\r\n]+"),)): "seed-coder",
    PreTokenizer((_o200k(r"\p{N}", ""),), ignore_merges=True, add_bos=True): "tekken",
    PreTokenizer((_O200K,)): "gpt-4o llama4 kanana2 minimax-m2 talkie",
    PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)): "tiny_aya cohere2moe",
    PreTokenizer((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True): "minicpm5",
    PreTokenizer(
        (
            "[\r\n]",
            rf"\s?{_CASED_LETTERS}",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    PreTokenizer((_KIMI_K2,), ignore_merges=True): "kimi-k2",
    PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): "deepseek-coder",
    _DEEPSEEK_V3: "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    _AFMOE: "afmoe",
    # The second name is that of files written before llama.cpp had the model.
    PreTokenizer((r"\p{N}", _HAN_AND_KANA, _SPARK_WORDS)): "spark2_5 spark3",
    PreTokenizer((r"[^\n]+|\n+", _QWEN2)): "laguna",
    PreTokenizer((_EXAONE_MOE,)): "exaone-moe",
    PreTokenizer((_JAIS2,)): "jais-2",
    PreTokenizer((_cl100k(r"\p{N}{1,3}", r"[\p{L}\p{M}\x{200C}\x{200D}]+"),)): "k2-horizon",
    PreTokenizer((_O200K,), ignore_merges=True): "granite-embed-multi-97m",
    _YOUTU: "youtu",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    _SENTENCES: "poro-chat bloom gpt3-finnish",
    PreTokenizer((*_SENTENCES.patterns, r"\p{N}")): "viking",
    PreTokenizer((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): "superbpe",
}

PRE_TOKENIZERS = {name: scheme for scheme, names in _SCHEMES.items() for name in names.split()}
