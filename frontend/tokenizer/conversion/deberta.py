"""Convert the tokenizer of a DeBERTa v2 or v3 that has only a model of SentencePiece, `spm.model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ....protocol.errors import CheckpointError
from .parts import added_token
from .sentencepiece import SPACE, normalizers, read_sentencepiece
from .settings import Settings, settings_files

_MODEL: Final = "spm.model"
_NAMED: Final = {
    "bos": "[CLS]",
    "eos": "[SEP]",
    "unk": "[UNK]",
    "sep": "[SEP]",
    "pad": "[PAD]",
    "cls": "[CLS]",
    "mask": "[MASK]",
}


def deberta_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    path = directory / _MODEL
    return [path, *settings_files(directory)] if path.is_file() else []


def convert_deberta(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: The file is damaged, or lacks a named token.
    """
    path, settings = directory / _MODEL, Settings(directory)
    model, named = read_sentencepiece(path), settings.named(**_NAMED)
    if not model.is_unigram:
        raise CheckpointError(path, "not a unigram model of SentencePiece, which is needed")
    vocabulary = [(piece.text, piece.score) for piece in model.pieces]
    tokens = [text for text, _ in vocabulary]
    # The mask follows the vocabulary, and older directories have no file that names it.
    mask = {} if named["mask_token"] in tokens else {len(tokens): named["mask_token"]}
    added = settings.added or mask
    for id_, token in sorted(added.items()):
        if id_ > len(tokens):
            raise CheckpointError(path, f"no file has the tokens {len(tokens)} to {id_ - 1}")
        tokens[id_ : id_ + 1], vocabulary[id_ : id_ + 1] = [token], [(token, 0.0)]
    for name in ("cls_token", "sep_token", "unk_token"):
        if named[name] not in tokens:
            raise CheckpointError(path, f"there is no token {named[name]!r}")
    special = {*named.values(), *settings.special}
    steps: list[dict[str, Any]] = []
    if settings.fields.boolean("do_lower_case", False):
        steps.append({"type": "Lowercase"})
    steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
    steps += normalizers(model.charsmap or None, model.removes_spaces)
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always"}
    splits = [metaspace | {"split": True}]
    if settings.fields.boolean("split_by_punct", False):
        splits.insert(0, {"type": "Punctuation", "behavior": "Isolated"})
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": settings.with_flags(
            [
                added_token(id_, token, special=token in special)
                for id_, token in enumerate(tokens)
                if token in special or id_ in added
            ]
        ),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": metaspace | {"split": True},
        "post_processor": _post_processor(tokens, named),
        "model": {
            "type": "Unigram",
            "unk_id": tokens.index(named["unk_token"]),
            "vocab": vocabulary,
            "byte_fallback": False,
        },
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}


def _post_processor(tokens: list[str], named: dict[str, str]) -> dict[str, Any]:
    """Return the part that puts special tokens around a text, and one between two texts."""
    cls, sep = named["cls_token"], named["sep_token"]

    def special(token: str, number: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": number}}

    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    single = [special(cls, 0), first, special(sep, 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second, special(sep, 1)],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in (cls, sep)
        },
    }
