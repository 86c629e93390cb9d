"""Convert the tokenizer of an ALBERT, a RemBERT or a DeBERTa v2 or v3 that has only a model of SentencePiece."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, enclose
from .sentencepiece import SPACE, normalizers, read_sentencepiece
from .settings import Settings, settings_files

_DEBERTA, _ALBERT, _REMBERT = "spm.model", "spiece.model", "sentencepiece.model"
_NAMED: Final = {
    "bos": "[CLS]",
    "eos": "[SEP]",
    "unk": "[UNK]",
    "sep": "[SEP]",
    "pad": "[PAD]",
    "cls": "[CLS]",
    "mask": "[MASK]",
}
_ALBERT_NAMED: Final = _NAMED | {"unk": "<unk>", "pad": "<pad>"}


def encoder_pieces_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    paths = (directory / name for name in (_DEBERTA, _ALBERT, _REMBERT))
    path = next((path for path in paths if path.is_file()), None)
    # Other models have a model of SentencePiece with the same name as ALBERT's.
    if path is None or (path.name == _ALBERT and not _is_albert(Settings(directory))):
        return []
    return [path, *settings_files(directory)]


def _is_albert(settings: Settings) -> bool:
    return settings.tokenizer_class == "AlbertTokenizer" or settings.model_type == "albert"


def convert_encoder_pieces(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: The file is damaged, or lacks a named token.
    """
    path, settings = encoder_pieces_files(directory)[0], Settings(directory)
    model, named = (
        read_sentencepiece(path),
        settings.named(**(_ALBERT_NAMED if path.name == _ALBERT else _NAMED)),
    )
    if not model.is_unigram:
        raise CheckpointError(path, "must be a unigram model of SentencePiece")
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
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always"}
    splits = [metaspace | {"split": True}]
    changes = normalizers(model.charsmap or None, model.removes_spaces)
    if path.name == _DEBERTA:
        steps = _deberta_steps(settings, changes)
        if settings.fields.boolean("split_by_punct", False):
            splits.insert(0, {"type": "Punctuation", "behavior": "Isolated"})
    else:
        steps = _albert_steps(settings, changes, is_first=path.name == _ALBERT)
        splits.insert(0, {"type": "WhitespaceSplit"})
    tokenizer = {
        **HEAD,
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
        "post_processor": enclose(tokens, named["cls_token"], named["sep_token"]),
        "model": {
            "type": "Unigram",
            "unk_id": tokens.index(named["unk_token"]),
            "vocab": vocabulary,
            "byte_fallback": False,
        },
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}


def _deberta_steps(settings: Settings, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the normalizers of a DeBERTa. `changes` are those of the model of SentencePiece."""
    is_lower = settings.fields.boolean("do_lower_case", False)
    lower = [{"type": "Lowercase"}] if is_lower else []
    return [*lower, {"type": "Strip", "strip_left": True, "strip_right": True}, *changes]


def _albert_steps(
    settings: Settings, changes: list[dict[str, Any]], *, is_first: bool
) -> list[dict[str, Any]]:
    """Return the normalizers of an ALBERT, or of a RemBERT unless `is_first`."""
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": quotes}, "content": '"'}
        for quotes in ("``", "''")
    ]
    if not settings.fields.boolean("keep_accents", not is_first):
        steps += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if settings.fields.boolean("do_lower_case", is_first):
        steps.append({"type": "Lowercase"})
    return steps + changes
