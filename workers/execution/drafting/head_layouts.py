"""The layouts of published drafting heads: the names of their tensors, and which hidden states they read.

A head predicts the token after the next one. It combines the embedding of the next token and the model's hidden state
of the last token into one vector, which passes through a decoder layer. An output projection, usually the model's own,
turns the result into logits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.config import ProposerMethod, SpeculativeConfig
from ....protocol.errors import CheckpointError
from ...layers.layer_spec import LayerSpec
from ...layers.spec import ModelSpec
from ...layers.specs.norm_names import NormNames
from ...loaders import Checkpoint, open_checkpoint
from ...loaders.tensor_names import TensorNames
from ...models.families import model_spec
from .block_inputs import read_block_inputs

EMBEDDING: Final = "embedding.weight"
EMBEDDING_NORM: Final = "embedding_norm.weight"
HIDDEN_NORM: Final = "hidden_norm.weight"
PROJECTION: Final = "projection.weight"
PROJECTION_BIAS: Final = "projection.bias"
OUTPUT_PROJECTION: Final = "output_projection.weight"
TOKEN_OFFSETS: Final = "token_offsets"

_EAGLE3_NAMES: Final = re.compile(
    r"LlamaForCausalLMEagle3|Eagle3(Llama|Qwen\w*)ForCausalLM|Eagle3Speculator|Eagle3DraftModel|"
)


class HeadLayout(msgspec.Struct, frozen=True):
    """The layout of a head in a checkpoint.

    `spec` describes its decoder layer. It has no embedding, and an output projection only if the head has its own.
    `tensor_names` translates the names of the other tensors to those above; only the projection is required.

    The projection reads the concatenation of embedding and hidden state, or of hidden state and embedding if
    `has_hidden_first`. For the first draft, the hidden state is the model's after its final norm, or the ones that the
    model keeps if `reads_kept`. For later drafts it is the head's own, after its final norm if `returns_normed`, else
    before it.

    If `projects_states`, the projection reads only hidden states of the model and reduces them to one. The layer then
    reads the concatenation of the embedding and that hidden state, both normed. It adds its output to the hidden state,
    normed if `adds_to_normed`.

    If `reads_cache`, the layers have no keys and values. The `kv_source` of each is a layer of the model. Such a head
    may have another hidden size than the model, and an output projection between the two. If `num_chosen_clusters` is
    not 0, it computes only the logits of that many clusters of tokens.

    If `block_size` is not 0, the head predicts up to that many tokens in one pass, including the last known one, from
    `mask_token_id` in place of the others. Its layers have keys and values of the projected hidden states. Tokens of
    the block attend to each other, unless `is_causal`.
    """

    spec: ModelSpec
    tensor_names: TensorNames
    has_hidden_first: bool = False
    reads_kept: bool = False
    returns_normed: bool = False
    projects_states: bool = False
    adds_to_normed: bool = False
    reads_cache: bool = False
    num_chosen_clusters: int = 0
    block_size: int = 0
    mask_token_id: int = 0
    is_causal: bool = False


def read_layout(
    speculative: SpeculativeConfig, target: ModelSpec, checkpoint: Checkpoint
) -> HeadLayout:
    """Return the layout of the head in a checkpoint.

    Raises:
        CheckpointError: The checkpoint has no head, or its layout is not supported.
    """
    if speculative.method is ProposerMethod.MTP:
        return _read_mtp(target, checkpoint)
    if speculative.method is ProposerMethod.EAGLE3:
        return _read_eagle3(checkpoint)
    return _read_eagle(checkpoint)


def find_kept_layers(speculative: SpeculativeConfig, target: ModelSpec) -> Sequence[int]:
    """Return the model's layers whose inputs the head reads; the number of layers means the final norm.

    Raises:
        CheckpointError: The head's config names layers that the model does not have.
    """
    count = len(target.layers)
    if not speculative.method.reads_inner_states or speculative.model is None:
        return (count,)
    checkpoint = open_checkpoint(speculative.model)
    fields = ConfigFields(checkpoint.config, checkpoint.config_path)
    if speculative.method is ProposerMethod.DFLASH:
        return read_block_inputs(fields, count)
    name = "eagle_aux_hidden_state_layer_ids"
    section = fields.section("eagle_config")
    layers = fields.get(name) or (None if section is None else section.get(name))
    # The configs of the first published heads do not name the layers.
    layers = layers or [2, count // 2, count - 3]
    if not isinstance(layers, list) or any(
        not isinstance(layer, int) or not 0 <= layer <= count for layer in layers
    ):
        raise fields.wrong(name, f"a list of layers from 0 to {count}, those of the model", layers)
    return tuple(layers)


def _read_eagle(checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of an EAGLE head (arXiv 2401.15077), a layer without input norm and final norm."""
    config = dict(checkpoint.config)
    names = config.get("architectures") or ["LlamaForCausalLM"]
    config["architectures"] = [re.sub(r"^Eagle(?=[A-Z])", "", str(names[0]))]
    spec = model_spec(config, checkpoint.config_path)
    first = replace(spec.layers[0], norms=replace(spec.norms, attention_input=None))
    others = (r"^(model\.)?(fc|embed_tokens|lm_head|norm)\..*", "")
    spec = replace(
        headless(spec),
        layers=(first, *spec.layers[1:]),
        has_final_norm=False,
        tensor_names=(*spec.tensor_names, others),
    )
    return HeadLayout(spec, ((r"^(model\.)?fc\.", "projection."),))


def _read_eagle3(checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of an EAGLE-3 head (arXiv 2503.01840) for Llama.

    In heads trained with the library Speculators, the fields of the layer are in a section of the config.
    """
    config: dict[str, Any] = dict(checkpoint.config)
    section = config.get("transformer_layer_config")
    names = config.get("architectures") or [""]
    if not _EAGLE3_NAMES.fullmatch(str(names[0])):
        raise CheckpointError(
            checkpoint.path,
            f"the architecture {names[0]!r} is not an EAGLE-3 head with a Llama layer, such as "
            "'LlamaForCausalLMEagle3'; use another head, or another method in --speculative-config",
        )
    of_layer = {**config, **section} if isinstance(section, dict) else config
    vocab_size = config.get("draft_vocab_size") or of_layer.get("vocab_size")
    of_layer |= {"architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size}
    spec = model_spec(of_layer, checkpoint.config_path)
    first = replace(
        spec.layers[0],
        input_size=2 * spec.hidden_size,
        norms=NormNames(attention_input=None),
    )
    stored = checkpoint.names()
    layer = r"^(?:model\.)?(?:midlayer|layers\.0)\."
    fusion = (
        (rf"{layer}input_layernorm\.", "embedding_norm."),
        (rf"{layer}hidden_norm\.", "hidden_norm."),
        (r"^(model\.)?fc\.", "projection."),
        (r"^(model\.)?embed_tokens\.", "embedding."),
        (r"^(model\.)?d2t$", TOKEN_OFFSETS),
    )
    outside = (
        rf"{layer}(input_layernorm|hidden_norm)\..*|^(model\.)?((fc|embed_tokens)\..*|d2t|t2d)$",
        "",
    )
    inside = (layer, "layers.0.")
    spec = replace(
        headless(spec),
        layers=(first, *spec.layers[1:]),
        has_head=any(name.endswith("lm_head.weight") for name in stored),
        tensor_names=(
            outside,
            inside,
            (r"^(model\.)?(?!lm_head\.)(?=.)", "model."),
            *spec.tensor_names,
        ),
    )
    return HeadLayout(
        spec,
        fusion,
        reads_kept=True,
        projects_states=True,
        adds_to_normed=bool(config.get("norm_before_residual", isinstance(section, dict))),
    )


class _MTPNames(msgspec.Struct, frozen=True):
    """The layout of one family's layers for multi-token prediction: patterns of tensor names, and properties.

    `start` matches the beginning of all names, and `layer` the names of the decoder layer's tensors. `others` match
    copies of tensors of the model.
    """

    start: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    others: str
    has_hidden_first: bool = False
    reads_kept: bool = False
    returns_normed: bool = False


def _mtp_layouts(num_layers: int, architecture: str) -> tuple[_MTPNames, ...]:
    """Return the known layouts, which are used by DeepSeek-V3 and GLM-4.5, by MiMo, and by Qwen3-Next and Qwen3.5.

    GGUF files have the first one for all families.
    """
    return (
        _MTPNames(
            start=rf"layers\.{num_layers}\.",
            layer="",
            embedding_norm="enorm",
            hidden_norm="hnorm",
            projection="eh_proj",
            final_norm=r"shared_head\.norm",
            others=r"embed_tokens|shared_head\.head",
            returns_normed=architecture.startswith(("Qwen3Next", "Qwen3_5")),
        ),
        _MTPNames(
            start=r"mtp_layers\.0\.",
            layer="",
            embedding_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            projection="input_proj",
            final_norm="final_layernorm",
            others="embed_tokens",
            has_hidden_first=True,
            reads_kept=True,
            returns_normed=True,
        ),
        _MTPNames(
            start=r"mtp\.",
            layer=r"layers\.0\.",
            embedding_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            projection="fc",
            final_norm="norm",
            others="embed_tokens|lm_head",
            returns_normed=True,
        ),
    )


def _read_mtp(target: ModelSpec, checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of the multi-token-prediction layer in a model's checkpoint."""
    stored = checkpoint.names()
    architecture = str((checkpoint.config.get("architectures") or [""])[0])
    for names in _mtp_layouts(len(target.layers), architecture):
        pattern = re.compile(rf"(^|.*\.){names.start}{names.projection}\.weight")
        if any(pattern.fullmatch(name) for name in stored):
            return _mtp_layout(target, names)
    raise CheckpointError(
        checkpoint.path,
        "no multi-token prediction layer with a known layout was found; use another method in "
        "--speculative-config",
    )


def _mtp_layout(target: ModelSpec, names: _MTPNames) -> HeadLayout:
    start = rf"^(?:.*\.)?{names.start}"
    parts = {
        names.embedding_norm: "embedding_norm.",
        names.hidden_norm: "hidden_norm.",
        names.projection: "projection.",
    }
    spec = replace(
        headless(target),
        layers=(_attending(target),),
        tensor_names=(
            (rf"^(?!(.*\.)?{names.start}).*", ""),
            (rf"{start}(?:{'|'.join(parts)}|{names.others})\..*", ""),
            (rf"{start}(?:{names.final_norm})\.", "model.norm."),
            (rf"{start}{names.layer}", "model.layers.0."),
            *target.tensor_names,
        ),
    )
    return HeadLayout(
        spec,
        tuple((rf"{start}{part}\.", name) for part, name in parts.items()),
        has_hidden_first=names.has_hidden_first,
        reads_kept=names.reads_kept,
        returns_normed=names.returns_normed,
    )


def _attending(target: ModelSpec) -> LayerSpec:
    """Return the last layer of a model that has attention and no recurrent state."""
    layers = [layer for layer in target.layers if layer.attends and layer.recurrent is None]
    return replace(layers[-1] if layers else target.layers[-1], kv_source=None)


def headless(spec: ModelSpec) -> ModelSpec:
    """Return a spec without embedding, output projection and encoder."""
    return replace(
        spec,
        has_embedding=False,
        has_head=False,
        tie_word_embeddings=False,
        head_bias=False,
        encoder=None,
        added_after=(),
        score_head=None,
    )
