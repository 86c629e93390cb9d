"""The layout of DFlash heads (arXiv 2602.06036) and of DSpark heads, which propose a block of tokens in one pass.

Such a head has a few layers like those of Qwen3 or another family. Their keys and values of the known tokens come from
hidden states of the model, which `fc` combines into one vector per token. The block begins with the last token,
followed by mask tokens. A DSpark head also has a Markov head, by which a draft depends on the one before it. A DFlash 2
head has a selector for that, and convolutions over the block in its layers. An XPress head has a refiner, by which a
draft depends on all drafts before it.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.errors import CheckpointError
from ....layers.layer_spec import BlockConvolution
from ....layers.spec import ModelSpec
from ....layers.window import SpanLayers
from ....loaders import Checkpoint
from ....models.families import model_spec
from .block_inputs import block_fields
from .head_layout import REFINER, TOKEN_OFFSETS, HeadLayout, headless, read_mask_token

_DFLASH2: Final = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
_LAGUNA: Final = "DFlashLagunaForCausalLM"
_DFLASH: Final = (
    *_DFLASH2,
    _LAGUNA,
    "DFlashDraftModel",
    "DFlashSpeculator",
    "DFlashMuseGlimmerAssistantModel",
    "MuseGlimmerAssistantModel",
)
_XPRESS: Final = ("DFlashQwen3XPressModel", "Qwen3XPressModel")
_DSPARK: Final = (
    "DSparkDraftModel",
    "DSparkMiniMaxDraftModel",
    "DSparkSpeculator",
    "Gemma4DSparkModel",
    "K3DSparkModel",
    "Lfm2DSparkDraftModel",
    "LingDSparkModel",
    "MuseGlimmerDSparkModel",
    "Qwen3DSparkModel",
    "Qwen3OmniDSparkModel",
)

_DECODERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    _LAGUNA: ("LagunaForCausalLM", {}),
    "DSparkMiniMaxDraftModel": ("MiniMaxM3SparseForCausalLM", {"layer_types": None}),
    # Layers with and without a window differ, but share no keys in a head.
    "Gemma4DSparkModel": (
        "Gemma4ForCausalLM",
        {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    ),
    # These are the layers of DeepSeek-V3 without experts.
    "K3DSparkModel": ("YoutuForCausalLM", {}),
    "MuseGlimmerDSparkModel": ("MuseGlimmerForConditionalGeneration", {}),
}
"""The decoder with the same layers as a head, and fields that differ in a head."""

_QWEN3: Final[tuple[str, dict[str, Any]]] = ("Qwen3ForCausalLM", {"layer_types": None})
"""The decoder of other heads, whose layers are alike with and without a window."""

_WINDOW: Final = "sliding_attention"
_START: Final = r"^(?:language_model\.)?(?:model\.)?(?:dspark\.)?"
_PARTS: Final = (
    (_START + r"(?:(?:encoder\.)?fc|context_proj)\.", "projection."),
    (_START + r"(?:hidden_norm|context_norm|encoder\.output_norm_enc)\.", "hidden_norm."),
    (_START + r"aux_hidden_norms\.", "state_norms."),
    (_START + r"embed_tokens\.", "embedding."),
    (_START + r"markov_head\.markov_w1\.", "markov.vectors."),
    (_START + r"markov_head\.markov_w2\.", "markov.matrix."),
    (_START + r"markov_head\.gate_proj\.", "markov.gate."),
    (_START + r"markov_head\.joint_proj\.", "markov.state."),
    (_START + r"candidate_selector\.", "selector."),
    (_START + r"xpress_head\.", REFINER),
    (_START + r"d2t$", TOKEN_OFFSETS),
)
_OUTSIDE: Final = (
    _START
    + r"(?:(?:(?:encoder\.)?(?:fc|hidden_norm|output_norm_enc|embed_tokens)|context_(?:proj|norm)|markov_head"
    r"|aux_hidden_norms"
    r"|confidence_head|candidate_selector|xpress_head)\..*"
    r"|mask_embedding|d2t|t2d)$"
)


def read_block(target: ModelSpec, checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of a head: that of its authors, of the library Speculators, or of Muse Glimmer.

    Raises:
        CheckpointError: The checkpoint has another architecture, or a field of its config is wrong.
    """
    fields = block_fields(checkpoint)
    architecture = str((checkpoint.config.get("architectures") or [""])[0])
    has_markov = architecture in _DSPARK
    has_refiner = architecture in _XPRESS
    if not (has_markov or has_refiner) and architecture not in _DFLASH:
        raise CheckpointError(
            checkpoint.path,
            f"heads of the architecture {architecture!r} are not supported, only "
            f"{', '.join(_DFLASH + _DSPARK + _XPRESS)}; use another head, or another method in --speculative-config",
        )
    own = fields.first_section("dflash_config")
    of_layers: dict[str, Any] = dict(fields.config)
    if (section := fields.section("transformer_layer_config")) is not None:
        of_layers |= section.config
    stored = checkpoint.names()
    has_head = any(name.endswith("lm_head.weight") for name in stored)
    vocab_size = fields.get("draft_vocab_size") if has_head else None
    is_second = architecture in _DFLASH2
    convolution = _convolution(own, fields.integer("hidden_size")) if is_second else None
    windows = _windows(ConfigFields(of_layers, fields.path), own)
    decoder, differences = _DECODERS.get(architecture, _QWEN3)
    of_layers |= {
        "architectures": [decoder],
        "vocab_size": vocab_size or of_layers.get("vocab_size") or target.vocab_size,
        "use_sliding_window": False,
        "text_config": None,
        **differences,
    }
    spec = model_spec(of_layers, fields.path)
    spec = replace(
        headless(spec),
        has_embedding_norm=False,
        layers=tuple(
            replace(layer, window=window, block_convolution=convolution)
            for layer, window in zip(spec.layers, windows, strict=True)
        ),
        has_head=has_head,
        rope_order=spec.rope_order if _rotates_halves(fields) else "interleaved",
        tensor_names=(
            (_OUTSIDE, ""),
            (_START + r"(?!lm_head\.)(?=.)", "model."),
            (r"^model\.final_norm\.", "model.norm."),
            (r"\.decoder_layer\.", "."),
            *spec.tensor_names,
        ),
    )
    size = own.get("block_size", fields.get("block_size", fields.get("dspark_block_size", 16)))
    if has_refiner:
        fields.require("sample_from_anchor", False)
        size = fields.get("xpress_block_size", fields.integer("num_speculative_steps", 15) + 1)
    sizes = fields.with_values({"block_size": size})
    return HeadLayout(
        spec,
        _PARTS,
        reads_kept=True,
        projects_states=True,
        norms_context=architecture == _LAGUNA,
        block_size=sizes.integer("block_size", minimum=2 - has_markov),
        mask_token_id=read_mask_token(fields, target.vocab_size),
        mutual_layers=_mutual_layers(fields, own, architecture),
        # Heads of the library Speculators say so if the last token predicts; those of DSpark's authors always do.
        predicts_from_last=has_markov and fields.boolean("sample_from_anchor", section is None),
        has_markov=has_markov or has_refiner,
        has_refiner=has_refiner,
        num_candidates=own.integer("selector_top_k") if is_second else 0,
        logits_scale=own.number("output_multiplier", 1.0),
        logits_softcap=own.optional_number("final_logit_softcapping") or 0.0,
        input_scale=own.number("input_embedding_scale", 1.0),
    )


def _convolution(own: ConfigFields, hidden_size: int) -> BlockConvolution:
    """Return the convolutions of the layers of a DFlash 2."""
    size = own.integer("conv_group_size")
    if hidden_size % size:
        raise own.wrong("conv_group_size", f"a divisor of hidden_size={hidden_size}", size)
    return BlockConvolution(own.integer("conv_kernel_size"), size)


def _mutual_layers(fields: ConfigFields, own: ConfigFields, architecture: str) -> SpanLayers | None:
    """Return the layers in which the tokens of a block attend to each other; None if attention is causal in all.

    If the config does not say it, layers that it lists with a window are causal, in heads of the method's authors.
    """
    for section, name, causal in (
        (fields, "is_causal", True),
        (own, "causal", True),
        (fields, "sliding_window_non_causal", False),
    ):
        if section.get(name) is not None:
            return None if section.boolean(name, False) is causal else SpanLayers.ALL
    kinds = set(fields.get("layer_types") or ())
    of_authors = "DFlashDraftModel", _LAGUNA, *_DFLASH2, *_XPRESS
    if architecture not in of_authors or _WINDOW not in kinds:
        return SpanLayers.ALL
    return None if kinds == {_WINDOW} else SpanLayers.WITHOUT_WINDOW


def _rotates_halves(fields: ConfigFields) -> bool:
    return fields.boolean("rope_is_neox_style", fields.boolean("is_neox_style", True))


def _windows(fields: ConfigFields, own: ConfigFields) -> list[int | None]:
    """Return the window of each layer, or None."""
    count = fields.layer_count("num_hidden_layers")
    kinds = fields.per_layer("layer_types", count) or ["full_attention"] * count
    if own.boolean("use_swa", False) and _WINDOW not in kinds:
        kinds = [_WINDOW] * count
    if _WINDOW not in kinds:
        return [None] * count
    given = fields.with_values(
        {"sliding_window": own.get("swa_window_size", fields.get("sliding_window"))}
    )
    size = given.integer("sliding_window")
    return [size if kind == _WINDOW else None for kind in kinds]
