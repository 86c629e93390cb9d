"""Translate the classification head of a GGUF file, such as that of a reranker."""

from __future__ import annotations

import re
from typing import Any, Final

from ..pooling.classification import HEAD_PARTS, PAIR_TEMPLATE, YES_OR_NO
from .fields import ModelFields
from .parts import RANK, head_pooling

_TEMPLATE_KEY: Final = "tokenizer.chat_template.rerank"
_PARTS: Final = {
    "cls.weight": "dense",
    "cls.bias": "dense_bias",
    "cls.norm.weight": "norm",
    "cls.output.bias": "output_bias",
}
_YES_AND_NO: Final = ["yes", "no"]
"""The labels of decoders whose score is the probability of the first of two tokens."""


def score_head(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of a model with a classification head; {} without one.

    The head is a projection, often after a dense layer. Files of Jina's first rerankers name the projection like the
    dense layer of others. Masked language models have a dense layer, which is not used, but no projection.
    """
    parts = [part for name, part in _PARTS.items() if fields.has_tensor(name)]
    output = fields.gguf.tensors.get("cls.output.weight")
    if output is None:
        output = fields.gguf.tensors.get("cls.weight")
        is_square = output is not None and len(output.shape) == 2 and output.shape[0] > 1
        if output is None or (is_square and fields.get("pooling_type") != RANK):
            return {}
        parts = ["output_bias"] if "dense_bias" in parts else []
    count = output.shape[0] if len(output.shape) == 2 else 1
    labels = fields.texts("classifier.output_labels")
    if labels == _YES_AND_NO and count == len(labels):
        parts.append(YES_OR_NO)
        labels = labels[:1]
    labels = labels or [f"LABEL_{i}" for i in range(count)]
    return {
        HEAD_PARTS: parts,
        "classifier_pooling": head_pooling(fields),
        "id2label": {str(i): label for i, label in enumerate(labels)},
        PAIR_TEMPLATE: _as_jinja(str(fields.config.get(_TEMPLATE_KEY) or "")),
    }


def _as_jinja(template: str) -> str:
    """Return the chat template for a text with the marks {query} and {document}."""
    marks = {"{query}": "messages[0].content", "{document}": "messages[1].content"}
    parts = re.split(r"(\{query\}|\{document\})", template)
    return "".join(f"{{{{ {marks.get(part) or _literal(part)} }}}}" for part in parts if part)


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
