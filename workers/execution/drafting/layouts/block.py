"""The layout of DFlash heads (arXiv 2602.06036), which propose a block of tokens in one pass.

Such a head has a few layers like those of Qwen3. Their keys and values of the known tokens come from hidden states of
the model, which `fc` combines into one vector per token. The block begins with the last token, followed by a mask token
for each draft.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.errors import CheckpointError
from ....layers.spec import ModelSpec
from ....loaders import Checkpoint
from ....models.families import model_spec
from .head_layout import TOKEN_OFFSETS, HeadLayout, headless

_ARCHITECTURES: Final = ("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel")


def read_block(target: ModelSpec, checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of a DFlash head: that of its authors, of the library Speculators, or of Muse Glimmer.

    Raises:
        CheckpointError: The checkpoint has another architecture, or a field of its config is wrong.
    """
    fields = ConfigFields(checkpoint.config, checkpoint.config_path)
    architecture = str((checkpoint.config.get("architectures") or [""])[0])
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            checkpoint.path,
            f"the architecture {architecture!r} is not a DFlash head ({', '.join(_ARCHITECTURES)}); use another head, "
            "or another method in --speculative-config",
        )
    own = fields.first_section("dflash_config")
    of_layers: dict[str, Any] = dict(checkpoint.config)
    if (section := fields.section("transformer_layer_config")) is not None:
        of_layers |= section.config
    stored = checkpoint.names()
    has_head = any(name.endswith("lm_head.weight") for name in stored)
    vocab_size = fields.get("draft_vocab_size") if has_head else None
    windows = _windows(ConfigFields(of_layers, fields.path), own)
    of_layers |= {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab_size or of_layers.get("vocab_size") or target.vocab_size,
        "use_sliding_window": False,
        "layer_types": None,
    }
    spec = model_spec(of_layers, fields.path)
    outside = r"^(model\.)?((encoder\.)?(fc|hidden_norm|output_norm_enc|embed_tokens)\..*|d2t|t2d)$"
    spec = replace(
        headless(spec),
        layers=tuple(
            replace(layer, window=window)
            for layer, window in zip(spec.layers, windows, strict=True)
        ),
        has_head=has_head,
        tensor_names=(
            (outside, ""),
            (r"^(model\.)?(?!lm_head\.)(?=.)", "model."),
            *spec.tensor_names,
        ),
    )
    mask = own.get("mask_token_id", fields.get("mask_token_id"))
    sizes = fields.with_values(
        {
            "block_size": own.get("block_size", fields.get("block_size", 16)),
            "mask_token_id": mask,
        }
    )
    return HeadLayout(
        spec,
        (
            (r"^(model\.)?(encoder\.)?fc\.", "projection."),
            (r"^(model\.)?(hidden_norm|encoder\.output_norm_enc)\.", "hidden_norm."),
            (r"^(model\.)?embed_tokens\.", "embedding."),
            (r"^(model\.)?d2t$", TOKEN_OFFSETS),
        ),
        reads_kept=True,
        projects_states=True,
        block_size=sizes.integer("block_size", minimum=2),
        mask_token_id=sizes.integer("mask_token_id", minimum=0, maximum=target.vocab_size - 1),
        is_causal=own.boolean("causal", fields.boolean("is_causal", False)),
    )


def _windows(fields: ConfigFields, own: ConfigFields) -> list[int | None]:
    """Return the window of each layer, or None."""
    count = fields.layer_count("num_hidden_layers")
    kinds = fields.per_layer("layer_types", count) or ["full_attention"] * count
    if own.boolean("use_swa", False) and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * count
    if "sliding_attention" not in kinds:
        return [None] * count
    given = fields.with_values(
        {"sliding_window": own.get("swa_window_size", fields.get("sliding_window"))}
    )
    size = given.integer("sliding_window")
    return [size if kind == "sliding_attention" else None for kind in kinds]
