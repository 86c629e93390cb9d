"""Convert a tokenizer that has only its vocabulary: `vocab.json` and `merges.txt`, or `vocab.txt` of BERT or ESM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, bpe, byte_level, enclose, surround, word_pieces
from .pretokenizers import PRE_TOKENIZERS
from .settings import Settings, settings_files

_VOCABULARY, _MERGES, _WORD_PIECES = "vocab.json", "merges.txt", "vocab.txt"

_GPT2: Final = dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")
_ROBERTA: Final = {
    "bos": "<s>",
    "eos": "</s>",
    "cls": "<s>",
    "sep": "</s>",
    "unk": "<unk>",
    "pad": "<pad>",
    "mask": "<mask>",
}
_QWEN2: Final = {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}
_INTERN: Final = dict(_QWEN2)
_BERT: Final = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_DEBERTA: Final = _BERT | {"bos": "[CLS]", "eos": "[SEP]"}
_ESM: Final = {"unk": "<unk>", "pad": "<pad>", "cls": "<cls>", "mask": "<mask>", "eos": "<eos>"}
_NAMED: Final = {
    "BartTokenizer": _ROBERTA,
    "BertTokenizer": _BERT,
    "CodeGenTokenizer": _GPT2,
    "ConvBertTokenizer": _BERT,
    "DebertaTokenizer": _DEBERTA,
    "DistilBertTokenizer": _BERT,
    "DreamTokenizer": _QWEN2,
    "ElectraTokenizer": _BERT,
    "EsmTokenizer": _ESM,
    "GPT2Tokenizer": _GPT2,
    "InternS1Tokenizer": _INTERN,
    "MobileBertTokenizer": _BERT,
    "Qwen2Tokenizer": _QWEN2,
    "RobertaTokenizer": _ROBERTA,
}
"""The classes of supported tokenizers, and the named tokens that are their defaults."""

_IN_TEXT: Final = (_BERT, _ESM)
"""The named tokens of the classes whose vocabulary is `vocab.txt`."""

_FORMULA: Final = re.compile(r"<\|(SMILES|PROT|XNA)_(.+)\|>", re.DOTALL)
"""Matches a token of formulas in the vocabulary of Intern-S1, and its text."""
_FORMULA_MARKS: Final = {"SMILES": "\ue000", "PROT": "\ue001", "XNA": "\ue002"}
"""Characters that no text has, which tell tokens of formulas from those of texts; the decoder removes them."""

_CLASSES: Final = {
    "bart": "BartTokenizer",
    "bert": "BertTokenizer",
    "codegen": "CodeGenTokenizer",
    "convbert": "ConvBertTokenizer",
    "deberta": "DebertaTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
    "ernie": "BertTokenizer",
    "esm": "EsmTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neo": "GPT2Tokenizer",
    "gptj": "GPT2Tokenizer",
    "megatron-bert": "BertTokenizer",
    "mobilebert": "MobileBertTokenizer",
    "opt": "GPT2Tokenizer",
    "phi": "CodeGenTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
}
"""Model type -> the class of the tokenizer, if no file names it."""


def vocabulary_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    for names in ((_VOCABULARY, _MERGES), (_WORD_PIECES,)):
        found = [directory / name for name in names]
        if all(path.is_file() for path in found):
            return [*found, *settings_files(directory)]
    return []


def convert_vocabulary(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: A file is damaged, or the class of the tokenizer is not supported.
    """
    path, settings = vocabulary_files(directory)[0], Settings(directory)
    kind = settings.tokenizer_class or _CLASSES.get(settings.model_type, "")
    if kind not in _NAMED or (_NAMED[kind] in _IN_TEXT) != (path.name == _WORD_PIECES):
        raise CheckpointError(
            path,
            f"the vocabulary is not read for the tokenizer_class {kind!r}; supported are "
            f"{', '.join(_NAMED)}; convert the tokenizer to tokenizer.json",
        )
    named = settings.named(**_NAMED[kind])
    try:
        tokens = _read_tokens(path, settings.added if _NAMED[kind] is _INTERN else {})
        merges = [] if _NAMED[kind] in _IN_TEXT else _read_merges(directory / _MERGES)
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"not a vocabulary: {error}") from error
    for id_, token in sorted(settings.added.items()):
        if id_ > len(tokens):
            raise CheckpointError(path, f"no file has the tokens {len(tokens)} to {id_ - 1}")
        tokens[id_ : id_ + 1] = [token]
    special = {*named.values(), *settings.special}
    # Each token of ESM is recognized wherever it is in a text.
    are_all_added = _NAMED[kind] is _ESM
    added = [
        added_token(id_, token, special=token in special)
        for id_, token in enumerate(tokens)
        if token in special or id_ in settings.added or are_all_added
    ]
    missing = next((token for token in named.values() if token not in tokens), None)
    if missing is not None and _NAMED[kind] not in (_GPT2, _QWEN2, _INTERN):
        raise CheckpointError(path, f"there is no token {missing!r}")
    tokenizer = {
        **HEAD,
        "added_tokens": settings.with_flags(added),
        "post_processor": _post_processor(kind, tokens, settings, named),
        **_parts(kind, tokens, merges, settings),
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}


def _read_tokens(path: Path, added: Mapping[int, str]) -> list[str]:
    """Return the tokens of a vocabulary in the order of their ids, among which are those that are `added`."""
    if path.name == _WORD_PIECES:
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    ids = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    ids |= {token: id_ for id_, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError("the ids of its tokens are not consecutive")
    return tokens


def _read_merges(path: Path) -> list[str]:
    """Return the pairs of tokens that are joined, from a file whose first line may be a comment."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [line for line in lines if line and not line.startswith("#version")]


def _parts(kind: str, tokens: list[str], merges: list[str], settings: Settings) -> dict[str, Any]:
    """Return the parts of tokenizer.json that split texts."""
    if _NAMED[kind] is _BERT:
        is_lower = settings.fields.boolean("do_lower_case", True)
        return word_pieces({token: i for i, token in enumerate(tokens)}, lowercase=is_lower)
    if _NAMED[kind] is _ESM:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        unknown = settings.named(**_ESM)["unk_token"]
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown},
        }
    settings.fields.require("add_prefix_space", False)
    if _NAMED[kind] is _INTERN:
        tokens = [_FORMULA.sub(_marked_formula, token) for token in tokens]
        parts = byte_level(PRE_TOKENIZERS["qwen2"].patterns, bpe(tokens, merges))
        steps = [
            {"type": "Replace", "pattern": {"String": mark}, "content": ""}
            for mark in _FORMULA_MARKS.values()
        ]
        return parts | {"decoder": {"type": "Sequence", "decoders": [*steps, parts["decoder"]]}}
    scheme = PRE_TOKENIZERS["qwen2" if _NAMED[kind] is _QWEN2 else "gpt-2"]
    return byte_level(scheme.patterns, bpe(tokens, merges), nfc=_NAMED[kind] is _QWEN2)


def _marked_formula(match: re.Match[str]) -> str:
    # SentencePiece writes a space as U+2581, and a vocabulary of bytes as U+0120.
    return _FORMULA_MARKS[match[1]] + match[2].replace("\u2581", "\u0120")


def _post_processor(
    kind: str, tokens: list[str], settings: Settings, named: dict[str, str]
) -> dict[str, Any] | None:
    """Return the part of tokenizer.json that adds special tokens to texts."""
    if _NAMED[kind] is _ESM:
        return enclose(tokens, named["cls_token"], named["eos_token"])
    if _NAMED[kind] is _DEBERTA:
        return enclose(tokens, named["cls_token"], named["sep_token"])
    if _NAMED[kind] in (_ROBERTA, _BERT):
        sep, cls = (
            [token, tokens.index(token)] for token in (named["sep_token"], named["cls_token"])
        )
        if _NAMED[kind] is _BERT:
            return {"type": "BertProcessing", "sep": sep, "cls": cls}
        return {
            "type": "RobertaProcessing",
            "sep": sep,
            "cls": cls,
            "trim_offsets": True,
            "add_prefix_space": False,
        }
    has_bos = settings.fields.boolean("add_bos_token", False)
    return surround(tokens, [named["bos_token"]] if has_bos else [], [])
