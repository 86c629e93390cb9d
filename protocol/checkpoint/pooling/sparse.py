"""Read the heads of models with sparse vectors: that of sentence-transformers' files, and those of BGE-M3."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

SPLADE_SUFFIX: Final = "SpladeSparseEmbeddingModel"
"""The suffix of the architecture name of models with a sparse head, as in vLLM."""

SPLADE_REDUCTION: Final = "splade_pooling"
"""The config field with how the weights of a text's tokens are combined, one of `SPLADE_REDUCTIONS`."""

SPLADE_REDUCTIONS: Final = ("max", "sum")

SPLADE_LOGARITHMS: Final = "splade_num_logarithms"
"""The config field with how often log(1 + max(x, 0)) is applied to the scores."""

BGE_M3: Final = "BgeM3EmbeddingModel"
"""The architecture, as in vLLM, of XLM-RoBERTa with layers for the vectors and for the weights of tokens."""

TOKEN_VECTORS_FILE: Final = "colbert_linear.pt"
TOKEN_WEIGHTS_FILE: Final = "sparse_linear.pt"

_MASKED_SUFFIX: Final = "ForMaskedLM"
_LOGARITHMS: Final = {"relu": 1, "log1p_relu": 2}


def is_sparse(fields: ConfigFields) -> bool:
    """Return whether a model with this config makes a weight for each token of the vocabulary."""
    return any(name.endswith(SPLADE_SUFFIX) for name in fields.texts("architectures"))


def has_three_heads(fields: ConfigFields) -> bool:
    """Return whether a model with this config embeds texts and tokens, and weighs the tokens (BGE-M3)."""
    return BGE_M3 in fields.texts("architectures")


def sparse_fields(pooling: ConfigFields, model: ConfigFields) -> dict[str, Any]:
    """Return the fields that turn the config of a masked language model into that of a model with a sparse head.

    `pooling` is the config of sentence-transformers' module `SpladePooling`.

    Raises:
        CheckpointError: A value is not supported.
    """
    names = model.texts("architectures")
    if len(names) != 1 or not names[0].endswith(_MASKED_SUFFIX):
        raise model.wrong("architectures", f"one {_MASKED_SUFFIX} for SpladePooling", names)
    activation = pooling.text("activation_function", "relu")
    if activation not in _LOGARITHMS:
        raise pooling.wrong("activation_function", " or ".join(_LOGARITHMS), activation)
    return {
        "architectures": [names[0].removesuffix(_MASKED_SUFFIX) + SPLADE_SUFFIX],
        SPLADE_REDUCTION: pooling.text("pooling_strategy", "max"),
        SPLADE_LOGARITHMS: _LOGARITHMS[activation],
    }
