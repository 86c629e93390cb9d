"""Encoders of texts that transformers computes: Engine has no spec of them.

A table names the families. Each text is computed as a whole by the class of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...config.model import ModelConfig
from ...pooling_params import PoolingKind
from ..config_fields import ConfigFields
from ..files import read_model_config
from .classification import CLASSIFIER_SUFFIX, TOKEN_CLASSIFIER_SUFFIX

_CLASSIFIERS: Final = (CLASSIFIER_SUFFIX, TOKEN_CLASSIFIER_SUFFIX)
_GENERATORS: Final = ("ForCausalLM", "ForConditionalGeneration", "ModelWithLMHead")
_MRA_BLOCK: Final = 32
"""The number of tokens of a block of an MRA."""

_DEFAULT_LENGTH: Final = 512
"""The length of texts, in tokens, that models without a limit were trained with."""


class ForeignEncoder(NamedTuple):
    """A family of encoders that transformers computes.

    Attributes:
        read_fields: Returns the fields of a config under Llama's names, where they have others.
        pooling: The pooling of embeddings unless the files of a checkpoint say otherwise.
        token_types: The token types of the first and the last token; None if the model has no embeddings of types. All
            others have type 0, or 1 in the second text of a pair.
        only_classifies: True if only the classes with a classification head are served.
        keeps_state: True if a text changes the module, such as the kind of its attention.
        min_tokens: The length up to which shorter texts are filled with tokens that others do not read.
        filled_length: Returns the length that texts are filled to; None if they are not.
        adds_mask: True if the mask of tokens is added to scores as it is given.
    """

    read_fields: Callable[[ConfigFields], dict[str, Any]] = lambda _: {}
    pooling: PoolingKind = PoolingKind.CLS
    token_types: tuple[int, int] | None = (0, 0)
    only_classifies: bool = False
    keeps_state: bool = False
    min_tokens: int = 1
    filled_length: Callable[[ConfigFields], int | None] = lambda _: None
    adds_mask: bool = False


def _xlm(fields: ConfigFields) -> dict[str, Any]:
    return {
        "vocab_size": fields.get("vocab_size", fields.get("n_words")),
        "hidden_size": fields.integer("emb_dim", 2048),
        "max_position_embeddings": fields.integer("max_position_embeddings", 512),
    }


def _canine(fields: ConfigFields) -> dict[str, Any]:
    return {
        # The tokens are the code points of Unicode.
        "vocab_size": 0x110000,
        "max_position_embeddings": fields.integer("max_position_embeddings", 16_384),
    }


def _unlimited(fields: ConfigFields) -> dict[str, Any]:
    return {"max_position_embeddings": fields.integer("max_position_embeddings", _DEFAULT_LENGTH)}


def _after_padding(padding: int) -> Callable[[ConfigFields], dict[str, Any]]:
    """Return a reader of configs whose positions begin after that of the padding token."""

    def read(fields: ConfigFields) -> dict[str, Any]:
        offset = fields.integer("pad_token_id", padding, minimum=0) + 1
        return {"max_position_embeddings": fields.integer("max_position_embeddings", 512) - offset}

    return read


def _nystromformer(fields: ConfigFields) -> dict[str, Any]:
    length = fields.integer("max_position_embeddings", 510)
    if (filled := _nystromformer_length(fields)) is not None:
        length = min(length, filled)
    return {"max_position_embeddings": length}


def _nystromformer_length(fields: ConfigFields) -> int | None:
    """Return the length that a Nystromformer fills texts to; None if its landmarks are the tokens themselves."""
    length, landmarks = (
        fields.integer(name, 64) for name in ("segment_means_seq_len", "num_landmarks")
    )
    return None if length == landmarks else length


def _mra_length(fields: ConfigFields) -> int:
    """Return the length that an MRA fills texts to, on which the number of exact pairs of blocks depends."""
    length = fields.integer("max_position_embeddings", 512)
    if length % _MRA_BLOCK:
        raise fields.wrong("max_position_embeddings", f"a multiple of {_MRA_BLOCK}", length)
    return length


def _perceiver(fields: ConfigFields) -> dict[str, Any]:
    return {
        "vocab_size": fields.integer("vocab_size", 262),
        "hidden_size": fields.integer("d_latents", 1280),
        "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
    }


def _t5gemma(fields: ConfigFields) -> dict[str, Any]:
    encoder = fields.required_section("encoder")
    text = encoder.section("text_config") or encoder
    return {
        "vocab_size": text.get("vocab_size", fields.get("vocab_size")),
        "hidden_size": text.get("hidden_size"),
        "max_position_embeddings": text.integer("max_position_embeddings", 8192),
    }


_FAMILIES: Final[dict[str, ForeignEncoder]] = {
    "big_bird": ForeignEncoder(keeps_state=True),
    "bigbird_pegasus": ForeignEncoder(token_types=None, only_classifies=True, keeps_state=True),
    "canine": ForeignEncoder(_canine, min_tokens=4),
    "flaubert": ForeignEncoder(_xlm, token_types=None),
    "fnet": ForeignEncoder(),
    "funnel": ForeignEncoder(_unlimited, token_types=(2, 0), min_tokens=8),
    "layoutlm": ForeignEncoder(),
    "layoutlmv3": ForeignEncoder(_after_padding(1)),
    "lilt": ForeignEncoder(_after_padding(0)),
    "longformer": ForeignEncoder(_after_padding(1)),
    "markuplm": ForeignEncoder(_after_padding(0), token_types=None),
    "neomme": ForeignEncoder(pooling=PoolingKind.MEAN, token_types=None),
    "mra": ForeignEncoder(filled_length=_mra_length),
    "nystromformer": ForeignEncoder(
        _nystromformer, filled_length=_nystromformer_length, adds_mask=True
    ),
    "perceiver": ForeignEncoder(_perceiver, token_types=None, only_classifies=True),
    "reformer": ForeignEncoder(token_types=None, only_classifies=True, keeps_state=True),
    "roc_bert": ForeignEncoder(),
    "squeezebert": ForeignEncoder(),
    "t5gemma": ForeignEncoder(_t5gemma, token_types=None, only_classifies=True),
    "t5gemma2": ForeignEncoder(_t5gemma, token_types=None, only_classifies=True),
    "tapas": ForeignEncoder(token_types=None),
    "xlm": ForeignEncoder(_xlm, token_types=None),
    "xlnet": ForeignEncoder(_unlimited, PoolingKind.LAST, token_types=(0, 2)),
    "xmod": ForeignEncoder(_after_padding(1)),
    "yoso": ForeignEncoder(),
}
"""The families by their `model_type`."""


def find_foreign_encoder(fields: ConfigFields) -> ForeignEncoder | None:
    """Return the family of a config whose encoder transformers computes; None for all others."""
    found = _FAMILIES.get(fields.text("model_type", ""))
    names = fields.texts("architectures")
    if found is None or fields.get("is_decoder") is True:
        return None
    if found.only_classifies:
        return found if any(name.endswith(_CLASSIFIERS) for name in names) else None
    return None if any(name.endswith(_GENERATORS) for name in names) else found


def read_foreign_encoder(model: ModelConfig) -> tuple[ConfigFields, ForeignEncoder] | None:
    """Return the config of an encoder that transformers computes, and its family; None for other models."""
    if not model.is_encoder or model.path.endswith(".gguf"):
        return None
    fields = read_model_config(Path(model.path)).with_values(model.hf_overrides)
    family = find_foreign_encoder(fields)
    return None if family is None else (fields, family)
