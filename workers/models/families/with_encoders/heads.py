"""Heads of bidirectional text encoders, and the families of an encoder with and without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.pooling.classification import CLASSIFIER_SUFFIX
from .....protocol.checkpoint.pooling.sparse import (
    SPLADE_LOGARITHMS,
    SPLADE_REDUCTION,
    SPLADE_REDUCTIONS,
)
from ....layers.activations import Activation
from ....layers.spec import ModelSpec
from ..common import Family, read_activation, with_score_head

_NOTHING: Final = "(?!)"
"""A regular expression that matches no name."""


class HeadNames(NamedTuple):
    """Regular expressions for the prefixes of a classification head's dense layer and output projection.

    The activation after the dense layer is that of the config field `field`, if there is one, else `activation`.
    """

    dense: str
    output: str
    activation: Literal["tanh", "relu", "gelu"] = "tanh"
    field: str | None = None


AFTER_POOLER: Final = HeadNames(r"^(.*\.)?pooler\.dense\.", r"^classifier\.")
WITH_OWN_DENSE: Final = HeadNames(r"^classifier\.dense\.", r"^classifier\.out_proj\.")


WITH_OWN_GELU_DENSE: Final = HeadNames(r"^classifier\.dense\.", r"^classifier\.out_proj\.", "gelu")
WITH_HIDDEN_ACT_DENSE: Final = WITH_OWN_GELU_DENSE._replace(field="hidden_act")
AFTER_GELU_POOLER: Final = AFTER_POOLER._replace(activation="gelu", field="pooler_hidden_act")


def encoder_families(
    name: str, model_type: str, read_spec: Callable[[ConfigFields], ModelSpec], head: HeadNames
) -> tuple[Family, ...]:
    """Return the families of an encoder that is stored alone, for masked tokens, and with a classification head."""

    def classifier(fields: ConfigFields) -> ModelSpec:
        activation: Activation = head.activation
        if head.field is not None:
            activation = read_activation(fields, head.field, activation)
        return with_score_head(
            read_spec(fields),
            fields,
            dense=head.dense,
            activation=activation,
            output=head.output,
            output_bias=True,
        )

    return (
        Family(f"{name}Model", model_type, read_spec),
        Family(f"{name}ForMaskedLM", model_type, read_spec),
        Family(f"{name}{CLASSIFIER_SUFFIX}", model_type, classifier),
    )


def with_splade_head(
    spec: ModelSpec,
    fields: ConfigFields,
    *,
    bias: str | None,
    activation: Activation = "gelu",
    **parts: Any,
) -> ModelSpec:
    """Return a spec whose head makes one weight for each token of the vocabulary (SPLADE, arXiv 2109.10086).

    Args:
        spec: The spec of the encoder.
        fields: The config of the masked language model.
        bias: A regular expression for the name of the output projection's bias; None if there is none.
        activation: The activation after the dense layer.
        parts: The dense layer and the norm of the head, as in `with_score_head`.
    """
    fields.require("tie_word_embeddings", True)
    reduction = fields.text(SPLADE_REDUCTION, "max")
    if reduction not in SPLADE_REDUCTIONS:
        raise fields.wrong(SPLADE_REDUCTION, " or ".join(SPLADE_REDUCTIONS), reduction)
    return with_score_head(
        spec,
        fields,
        output=_NOTHING if bias is None else bias,
        output_bias=bias is not None,
        scores_vocabulary=True,
        reduction=reduction,
        num_logarithms=fields.integer(SPLADE_LOGARITHMS, 1, maximum=2),
        activation=activation,
        **parts,
    )
