"""The layouts of layers for multi-token prediction, which are part of a model's checkpoint or in a file of their own.

A layer is like the last layer of the model that attends, with experts only if it stores some.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from .....protocol.errors import CheckpointError
from ....layers.layer_spec import LayerSpec
from ....layers.spec import ModelSpec
from ....layers.specs.norm_names import NormNames
from ....loaders import Checkpoint
from ....models.families import model_spec
from .head_layout import HeadLayout, headless


class _Names(msgspec.Struct, frozen=True):
    """The layout of one family's layers: patterns of tensor names, and properties.

    `start` matches the beginning of all names, and `layer` that of the decoder layer's names after it. `norms` match
    the names of the layer's norms for attention and for the MLP if they are not those of the model. `others` match
    copies of tensors of the model, and `head` an output projection of the layer's own. `embedding` matches the whole
    name of an embedding of its own. `mixer` matches the names of the connection after the layer, if the layer reads all
    streams of the model, and `embedding_projection` the product of the embedding that is added to each. If `is_plain`,
    the layer has common names even if those of the model differ. If `is_described`, the fields of the config that list
    layers also describe this one.
    """

    start: str
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str | None = None
    others: str = "embed_tokens"
    head: str | None = None
    embedding: str | None = None
    mixer: str | None = None
    embedding_projection: str | None = None
    layer: str = ""
    norms: tuple[str, str] | None = None
    is_plain: bool = False
    has_hidden_first: bool = False
    reads_kept: bool = False
    returns_normed: bool = False
    has_window: bool = False
    is_described: bool = False


_NOT_SUPPORTED: Final = {
    "Inkling": "the prediction layers of Inkling have convolutions, whose states a rejected draft cannot restore",
}
"""Beginnings of architectures -> the reason why their layers are not supported."""

_RETURNS_NORMED: Final = (
    *("Deepseek", "Dots3Note", "Glm5Next", "GlmMoeDsa", "InternS2", "Qwen3Next", "Qwen3_5"),
)
"""Architectures whose layers read the hidden states of the draft before after their final norm."""


def _layouts(num_layers: int, architecture: str, index: int = 0) -> tuple[_Names, ...]:
    """Return the known layouts of the layer for the draft `index`. GGUF files have the first one for all families.

    Layouts that are the same for all drafts have one layer.
    """
    number = num_layers + index
    return (
        # Ling 2, Ling 3, Hunyuan 3, and Hy4, whose layer has one residual stream.
        _Names(
            start=rf"(?:layers\.{number}|mtp_layers\.{index})\.",
            final_norm="final_layernorm",
            others=r"embed_tokens|shared_head\.head",
            returns_normed=True,
        ),
        # Step 3.5, whose layers have output projections of their own.
        _Names(
            start=rf"layers\.{number}\.",
            layer=r"(?:transformer\.)?",
            final_norm=r"(?:transformer\.)?shared_head\.norm",
            head=r"(?:transformer\.)?shared_head\.output",
            is_described=True,
        ),
        # DeepSeek-V3, GLM-4.5, GLM-5, Dots3-Note, openPangu and Kimi K3.
        _Names(
            start=rf"layers\.{number}\.",
            final_norm=r"shared_head\.norm",
            others=r"embed_tokens|shared_head\.head",
            returns_normed=architecture.startswith(_RETURNS_NORMED),
            embedding=r"mtp\.embed_tokens",
            has_window=architecture.startswith("Dots3Note"),
        ),
        # MiMo.
        _Names(
            start=rf"mtp_layers\.{index}\.",
            embedding_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            projection="input_proj",
            final_norm="final_layernorm",
            has_hidden_first=True,
            reads_kept=True,
            returns_normed=True,
        ),
        # Qwen3-Next, Qwen3.5, K-EXAONE and EXAONE 4.5.
        _Names(
            start=r"mtp\.",
            layer=r"layers\.0\.",
            embedding_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            projection="fc",
            final_norm="norm",
            others="embed_tokens|lm_head",
            returns_normed=True,
            has_window=architecture.startswith(("ExaoneMo", "Exaone4_5")),
        ),
        # Qwen4.
        _Names(
            start=r"mtp\.",
            layer=rf"layers\.{index}\.",
            embedding_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            projection="fc_hidden",
            embedding_projection="fc_embedding",
            mixer="hyper_connection_mixer",
            others=r"embed_tokens|lm_head|shared_head\.head|hyper_connection_mixer\.block_inject_weight",
        ),
        # MiniMax-M3.
        _Names(
            start=rf"mtp\.layers\.{index}\.",
            layer=r"transformer_layer\.",
            final_norm="final_layernorm",
        ),
        # MiMo-V2, whose layer has a window.
        _Names(
            start=rf"mtp\.layers\.{index}\.",
            final_norm="final_layernorm",
            norms=("input_layernorm", "pre_mlp_layernorm"),
            returns_normed=True,
            has_window=True,
        ),
        # LongCat-Flash.
        _Names(
            start=r"mtp\.",
            layer=r"layers\.0\.(?:transformer_layer\.)?",
            embedding_norm=r"layers\.0\.enorm\.m",
            hidden_norm=r"layers\.0\.hnorm\.m",
            projection=r"layers\.0\.eh_proj",
            final_norm="norm",
            is_plain=True,
            returns_normed=True,
        ),
        # Nemotron-H, whose layer of attention and layer of experts are one layer here.
        _Names(
            start=r"mtp\.layers\.",
            layer=r"[01]\.",
            embedding_norm=r"0\.enorm",
            hidden_norm=r"0\.hnorm",
            projection=r"0\.eh_proj",
            final_norm=r"1\.final_layernorm",
            norms=(r"0\.norm", r"1\.norm"),
            returns_normed=True,
        ),
        # ERNIE 4.5.
        _Names(
            start="mtp_",
            layer=rf"block\.{index}\.",
            embedding_norm=rf"emb_norm\.{index}",
            hidden_norm=rf"hidden_norm\.{index}",
            projection=rf"linear_proj\.{index}",
        ),
    )


def read_mtp(target: ModelSpec, checkpoint: Checkpoint, num_drafts: int) -> HeadLayout:
    """Return the layout of the layers for multi-token prediction in a model's checkpoint, at most `num_drafts`.

    Raises:
        CheckpointError: The checkpoint has no such layer, or none with a known layout.
    """
    count = len(target.layers)
    architecture = str((checkpoint.config.get("architectures") or [""])[0])
    by_draft = [_layouts(count, architecture, index) for index in range(num_drafts)]
    for first, *others in zip(*by_draft, strict=True):
        if not _is_stored(checkpoint.names(), first):
            continue
        found = [first]
        for names in others:
            if names in found or not _is_stored(checkpoint.names(), names):
                break
            found.append(names)
        layouts = [_read_layer(target, checkpoint, names, i) for i, names in enumerate(found)]
        return replace(layouts[0], later=tuple(layouts[1:]))
    reasons = (why for start, why in _NOT_SUPPORTED.items() if architecture.startswith(start))
    reason = next(reasons, "no multi-token prediction layer with a known layout was found")
    raise CheckpointError(checkpoint.path, f"{reason}; use another method in --speculative-config")


def _is_stored(stored: Collection[str], names: _Names) -> bool:
    needed = (
        *(names.embedding_norm, names.projection, names.final_norm, names.head),
        names.embedding_projection,
    )
    return _has(stored, names, f"{names.layer}.+") and all(
        _has(stored, names, rf"{part}\.weight") for part in needed if part is not None
    )


def _read_layer(target: ModelSpec, checkpoint: Checkpoint, names: _Names, index: int) -> HeadLayout:
    text = checkpoint.config.get("text_config") or checkpoint.config
    if names.is_described:
        config = _with_text(checkpoint.config, num_hidden_layers=len(target.layers) + index + 1)
        target = model_spec(config, checkpoint.config_path)
    elif text.get("mtp_num_experts") is not None:
        # The layers of Intern-S2 Mobius share experts, and this one has others.
        own = {name: text.get(f"mtp_{name}") for name in ("num_experts", "num_experts_per_tok")}
        config = _with_text(checkpoint.config, num_blocks=0, **own)
        target = model_spec(config, checkpoint.config_path)
    return _layout(target, checkpoint.names(), names)


def _with_text(config: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Return the config of a model with other values of the decoder's fields."""
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": text | values}
    return {**config, **values}


def _has(stored: Collection[str], names: _Names, pattern: str) -> bool:
    found = re.compile(rf"(.*\.)?{names.start}{pattern}")
    return any(found.fullmatch(name) for name in stored)


def _layout(target: ModelSpec, stored: Collection[str], names: _Names) -> HeadLayout:
    start = rf"^(?:.*\.)?{names.start}"
    parts = {
        names.embedding_norm: "embedding_norm.",
        names.hidden_norm: "hidden_norm.",
        names.projection: "projection.",
    }
    if names.embedding_projection is not None:
        parts[names.embedding_projection] = "embedding_projection."
    index, layer = _layer(target, names, has_experts=_has(stored, names, r".*\.(experts|moe)\..*"))
    if any(each.chooses_keys for each in target.layers):
        has_indexer = _has(stored, names, r".*(\.|sparse_)(indexer\.|indexer_|index_).*")
        layer = replace(layer, chooses_keys=has_indexer)
    renamed = {
        names.final_norm: "model.norm.",
        names.head: "lm_head.",
        names.mixer: "model.head_hc.",
    }
    if names.norms is not None:
        norms = layer.norms or target.norms
        for stored_name, name in zip(
            names.norms, (norms.attention_input, norms.mlp_input), strict=True
        ):
            renamed[stored_name] = f"model.layers.{index}.{name}."
    spec = replace(
        headless(target),
        layers=(layer,),
        hyper_connections=None if names.mixer is None else target.hyper_connections,
        ngrams=None,
        attention_residuals=None,
        has_final_norm=names.final_norm is not None,
        has_head=names.head is not None,
        tensor_names=(
            (rf"^(?!(.*\.)?{names.start}).*", ""),
            (rf"{start}(?:{'|'.join(parts)}|{names.others})\..*", ""),
            *(
                (rf"{start}(?:{part})\.", name)
                for part, name in renamed.items()
                if part is not None
            ),
            # The model may have other names in layers of other kinds.
            (rf"{start}{names.layer}", f"model.layers.{index}."),
            *(() if names.is_plain else target.tensor_names),
            (rf"(^|\.)layers\.{index}\.", r"\1layers.0."),
        ),
    )
    own = [] if names.embedding is None else [(rf"^(?:.*\.)?{names.embedding}\.", "embedding.")]
    return HeadLayout(
        spec,
        (*((rf"{start}{part}\.", name) for part, name in parts.items()), *own),
        has_hidden_first=names.has_hidden_first,
        reads_kept=names.reads_kept or names.mixer is not None,
        returns_normed=names.returns_normed,
        reads_streams=names.mixer is not None,
    )


def _layer(target: ModelSpec, names: _Names, *, has_experts: bool) -> tuple[int, LayerSpec]:
    """Return the last layer of a model that has attention and no recurrent state, with experts or without.

    Also return its index. In models whose layers have either attention or experts, the returned layer has both.
    """
    indices = [
        i
        for i, layer in enumerate(target.layers)
        if layer.attends
        and layer.recurrent is None
        and (layer.window is not None or not names.has_window)
    ]
    index = indices[-1] if indices else len(target.layers) - 1
    layer = replace(target.layers[index], kv_source=None)
    if not layer.has_mlp:
        layer = replace(layer, has_mlp=True, norms=NormNames())
    if not has_experts:
        return index, replace(layer, experts=None)
    if layer.experts is None:
        mixtures = [layer.experts for layer in target.layers if layer.experts is not None]
        layer = replace(layer, experts=mixtures[-1] if mixtures else None)
    return index, layer
