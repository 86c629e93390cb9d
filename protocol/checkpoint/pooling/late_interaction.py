"""Read how models for late interaction change queries and documents, in any of three layouts of files.

PyLate writes its settings to config_sentence_transformers.json, sentence-transformers to the files of its modules, and
the first ColBERT (`HF_ColBERT`) to artifact.metadata. For jina-reranker-v3, all documents and the query are in one
prompt.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Final

from ...config.model import (
    DenseActivation,
    DenseConfig,
    PoolerConfig,
    RankingConfig,
    TextChangesConfig,
)
from ...pooling_params import PoolingKind
from ..config_fields import ConfigFields
from ..files import find_tensor

FIRST_COLBERT: Final = "HF_ColBERT"
"""The architecture of checkpoints whose last dense layer is in the file of the encoder."""

LIST_RANKER: Final = "JinaForRanking"
"""The architecture of models that read all documents of a query in one prompt."""

QUERY: Final = "query"
DOCUMENT: Final = "document"
_SETTINGS: Final = (
    "attend_to_expansion_tokens",
    "do_query_expansion",
    "document_prefix",
    "query_prefix",
    "skiplist_words",
)
_PUNCTUATION: Final = tuple(string.punctuation)


def has_late_interaction(config: ConfigFields) -> bool:
    """Return whether a checkpoint has the layout of the first ColBERT."""
    return FIRST_COLBERT in config.texts("architectures")


def ranks_lists(config: ConfigFields) -> bool:
    """Return whether a model reads all documents of a query in one prompt."""
    return LIST_RANKER in config.texts("architectures")


def read_list_ranker(path: Path, config: ConfigFields) -> PoolerConfig:
    """Return the pooling of a model that reads all documents of a query in one prompt.

    Raises:
        CheckpointError: The file of its projector is missing.
    """
    hidden_size, size = config.integer("hidden_size"), config.integer("embedding_size", 512)
    sizes = ((0, hidden_size, hidden_size // 2), (2, hidden_size // 2, size))
    dense = tuple(
        DenseConfig(
            str(find_tensor(path, f"projector.{i}.weight")),
            inputs,
            outputs,
            False,
            DenseActivation.IDENTITY if i else DenseActivation.RELU,
            f"projector.{i}",
        )
        for i, inputs, outputs in sizes
    )
    ranking = RankingConfig("<|embed_token|>", "<|rerank_token|>")
    return PoolerConfig(PoolingKind.ALL, False, size, dense, ranking=ranking)


def read_first_colbert(path: Path) -> tuple[int, TextChangesConfig]:
    """Return the size of a vector and the settings of a checkpoint in the layout of the first ColBERT."""
    fields = ConfigFields.read_if_present(path / "artifact.metadata")
    return fields.integer("dim", 128), TextChangesConfig(
        prefixes={
            QUERY: fields.text("query_token_id", "[unused0]"),
            DOCUMENT: fields.text("doc_token_id", "[unused1]"),
        },
        lengths={
            QUERY: fields.integer("query_maxlen", 32),
            DOCUMENT: fields.integer("doc_maxlen", 180),
        },
        expanded_length=fields.integer("query_maxlen", 32),
        expansion_token=_expansion_token(path),
        attends_to_expansion=fields.boolean("attend_to_mask_tokens", False),
        skipped_tokens={DOCUMENT: _PUNCTUATION if fields.boolean("mask_punctuation", True) else ()},
    )


def read_pylate(path: Path, fields: ConfigFields) -> TextChangesConfig | None:
    """Return PyLate's settings in config_sentence_transformers.json, or None if it has none."""
    if fields.get("model_type") != "ColBERT" and not any(
        name in fields.config for name in _SETTINGS
    ):
        return None
    length = fields.integer("query_length", 32)
    expands = fields.boolean("do_query_expansion", True)
    skipped = (
        fields.texts("skiplist_words") if fields.get("skiplist_words") is not None else _PUNCTUATION
    )
    return TextChangesConfig(
        prefixes={
            QUERY: fields.text("query_prefix", "[Q] "),
            DOCUMENT: fields.text("document_prefix", "[D] "),
        },
        lengths={QUERY: length, DOCUMENT: fields.integer("document_length", 180)},
        expanded_length=length if expands else 0,
        expansion_token=_expansion_token(path) if expands else "",
        attends_to_expansion=fields.boolean("attend_to_expansion_tokens", False),
        skipped_tokens={DOCUMENT: tuple(skipped)},
    )


def read_multi_vector(
    path: Path, transformer: ConfigFields, mask: ConfigFields
) -> TextChangesConfig:
    """Return sentence-transformers' settings.

    Args:
        path: The directory of the checkpoint.
        transformer: The settings of the module `Transformer`.
        mask: The settings of the module `MultiVectorMask`.

    Raises:
        CheckpointError: A value is not supported.
    """
    mask.require("keep_only_token_ids", None)
    lengths = {
        name: length
        for name in (QUERY, DOCUMENT)
        if (length := transformer.optional_integer(f"{name}_length"))
    }
    expansion = transformer.section("query_expansion")
    expanded = 0 if expansion is None else expansion.integer("length")
    if expansion is not None and expansion.text("strategy") == "fixed":
        lengths[QUERY] = expanded
    tasks = mask.texts("skiplist_tasks") or [DOCUMENT]
    return TextChangesConfig(
        lengths=lengths,
        expanded_length=expanded,
        expansion_token=""
        if expansion is None
        else expansion.text("token", "") or _expansion_token(path),
        attends_to_expansion=expansion is not None and expansion.boolean("attend", False),
        skipped_tokens={name: tuple(mask.texts("skiplist_words")) for name in tasks},
    )


def _expansion_token(path: Path) -> str:
    """Return the mask token of a tokenizer, or else its end token."""
    return named_token(path, ("mask_token", "eos_token"), "which fills queries")


def named_token(path: Path, names: tuple[str, ...], purpose: str) -> str:
    """Return the text of the first of these tokens that a tokenizer has.

    Raises:
        CheckpointError: It has none of them.
    """
    for name in names:
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            fields = ConfigFields.read_if_present(path / file)
            if isinstance(fields.get(name), dict):
                return fields.required_section(name).text("content")
            if fields.get(name) is not None:
                return fields.text(name)
    raise ConfigFields.read_if_present(path / "tokenizer_config.json").error(
        f"{names[0]} is missing, {purpose}"
    )
