"""The layouts of published drafting heads: where their tensors are, and what they read.

A head predicts the token after the next one. It projects the next token's embedding and the model's hidden state of the
last token to one vector, which passes one decoder layer. The model's own output projection makes logits of the result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from ....protocol.errors import CheckpointError
from ...layers.spec import ModelSpec
from ...loaders import Checkpoint
from ...loaders.tensor_names import TensorNames
from ...models.families import model_spec

EMBEDDING_NORM: Final = "embedding_norm.weight"
HIDDEN_NORM: Final = "hidden_norm.weight"
PROJECTION: Final = "projection.weight"
PROJECTION_BIAS: Final = "projection.bias"


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A head in a checkpoint.

    `spec` is its decoder layer, without embedding and output projection. `tensor_names` translates the names of the
    other tensors to those above; the norms and the bias are optional. The projection reads the hidden state behind the
    embedding, or before it with `has_hidden_first`. The hidden state is that of the model after its final norm, or
    before it with `reads_unnormed`. For the following token it is the head's own, after its final norm with
    `returns_normed`, else before it.
    """

    spec: ModelSpec
    tensor_names: TensorNames
    has_hidden_first: bool = False
    reads_unnormed: bool = False
    returns_normed: bool = False


def read_eagle(checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of an EAGLE head (arXiv 2401.15077): a layer without input norm, and without a final one.

    Raises:
        CheckpointError: The layer is of an unknown architecture.
    """
    config = dict(checkpoint.config)
    names = config.get("architectures") or ["LlamaForCausalLM"]
    config["architectures"] = [re.sub(r"^Eagle(?=[A-Z])", "", str(names[0]))]
    spec = model_spec(config, checkpoint.config_path)
    first = replace(spec.layers[0], norms=replace(spec.norms, attention_input=None))
    others = (r"^(model\.)?(fc|embed_tokens|lm_head|norm)\..*", "")
    spec = replace(
        _headless(spec),
        layers=(first, *spec.layers[1:]),
        has_final_norm=False,
        tensor_names=(*spec.tensor_names, others),
    )
    return HeadLayout(spec, ((r"^(model\.)?fc\.", "projection."),))


def read_mtp(target: ModelSpec, checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of the layer for multi-token prediction in a model's checkpoint.

    Raises:
        CheckpointError: There is none, or not of a known layout.
    """
    names = checkpoint.names()
    index = len(target.layers)
    for layer, projection, difference in (
        (rf"layers\.{index}\.", "eh_proj", False),
        (r"mtp_layers\.0\.", "input_proj", True),
    ):
        pattern = re.compile(rf"(^|.*\.){layer}{projection}\.weight")
        if any(pattern.fullmatch(name) for name in names):
            return _mtp_of_layer(target, layer, has_own_names=difference)
    raise CheckpointError(
        checkpoint.path,
        "there is no layer for multi-token prediction of a known layout; use another method of --speculative-config",
    )


def _mtp_of_layer(target: ModelSpec, layer: str, *, has_own_names: bool) -> HeadLayout:
    """Return the layout of DeepSeek-V3 and GLM-4.5, or that of MiMo, which `has_own_names`."""
    parts = {
        "enorm|token_layernorm": "embedding_norm.",
        "hnorm|hidden_layernorm": "hidden_norm.",
        "eh_proj|input_proj": "projection.",
    }
    start = rf"^(?:.*\.)?{layer}"
    fusion = tuple((rf"{start}(?:{part})\.", name) for part, name in parts.items())
    elsewhere = (rf"^(?!(.*\.)?{layer}).*", "")
    outside = (rf"{start}(?:{'|'.join(parts)}|embed_tokens|shared_head\.head)\..*", "")
    final = (rf"{start}(?:shared_head\.norm|final_layernorm)\.", "model.norm.")
    inside = (start, "model.layers.0.")
    last = replace(target.layers[-1], kv_source=None)
    spec = replace(
        _headless(target),
        layers=(last,),
        tensor_names=(elsewhere, outside, final, inside, *target.tensor_names),
    )
    return HeadLayout(
        spec,
        fusion,
        has_hidden_first=has_own_names,
        reads_unnormed=has_own_names,
        returns_normed=has_own_names,
    )


def _headless(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        has_embedding=False,
        has_head=False,
        tie_word_embeddings=False,
        head_bias=False,
        encoder=None,
        num_deepstack_layers=0,
        score_head=None,
    )
