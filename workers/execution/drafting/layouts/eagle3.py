"""The layout of EAGLE-3 heads (arXiv 2503.01840): layers of Llama, Qwen3 or DeepSeek-V3 that read inner hidden states.

In heads trained with the library Speculators, the fields of the layer are in a section of the config. P-EAGLE heads are
EAGLE-3 heads with hidden states for unknown tokens, with which one pass computes all drafts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.errors import CheckpointError
from ....layers.spec import ModelSpec
from ....layers.specs.norm_names import NormNames
from ....loaders import Checkpoint
from ....models.families import model_spec
from .head_layout import MASK_STATES, TOKEN_OFFSETS, HeadLayout, headless, read_mask_token

_NAMES: Final = re.compile(
    r"(Llama|Qwen\w*)ForCausalLMEagle3|Eagle3(Llama|Qwen\w*|MiniMaxM2|Deepseek\w*)ForCausalLM|Eagle3Speculator|"
    r"Eagle3DraftModel|P[Ee]agle\w*|"
)
_LAYER: Final = r"^(?:model\.)?(?:midlayer|layers\.0)\."
_PARTS: Final = (
    (rf"{_LAYER}input_layernorm\.", "embedding_norm."),
    (rf"{_LAYER}hidden_norm\.", "hidden_norm."),
    (r"^(model\.)?fc\.", "projection."),
    (r"^(model\.)?input_norm\.", "states_norm."),
    (r"^(model\.)?fc_norm\.", "state_norms."),
    (r"^(model\.)?embed_tokens\.", "embedding."),
    (r"^(model\.)?mask_hidden$", MASK_STATES),
    (r"^(model\.)?d2t$", TOKEN_OFFSETS),
)
_OUTSIDE: Final = (
    rf"{_LAYER}(input_layernorm|hidden_norm)\..*"
    r"|^(model\.)?((fc|input_norm|fc_norm|embed_tokens)\..*|mask_hidden|d2t|t2d)$"
)


def read_eagle3(target: ModelSpec, checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of an EAGLE-3 head.

    Raises:
        CheckpointError: The checkpoint has another architecture, or a field of its config is wrong.
    """
    config: dict[str, Any] = dict(checkpoint.config)
    fields = ConfigFields(config, checkpoint.config_path)
    section = fields.section("transformer_layer_config")
    names = config.get("architectures") or [""]
    if not _NAMES.fullmatch(str(names[0])):
        raise CheckpointError(
            checkpoint.path,
            f"the architecture {names[0]!r} is not an EAGLE-3 head with a layer of Llama, Qwen3 or DeepSeek-V3, such as "
            "'LlamaForCausalLMEagle3'; use another head, or another method in --speculative-config",
        )
    of_layer = config if section is None else {**config, **section.config}
    vocab_size = config.get("draft_vocab_size") or of_layer.get("vocab_size")
    stored = checkpoint.names()
    of_layer = {
        **of_layer,
        "architectures": [_family(stored)],
        "vocab_size": vocab_size,
        # Heads have no experts, whatever their configs have taken from the model's.
        "first_k_dense_replace": of_layer.get("num_hidden_layers", 1),
    }
    spec = model_spec(of_layer, checkpoint.config_path)
    first = replace(
        spec.layers[0],
        input_size=2 * spec.hidden_size,
        norms=NormNames(attention_input=None),
    )
    spec = replace(
        headless(spec),
        layers=(first, *spec.layers[1:]),
        has_head=any(name.endswith("lm_head.weight") for name in stored),
        tensor_names=(
            (_OUTSIDE, ""),
            (_LAYER, "layers.0."),
            (r"^(model\.)?(?!lm_head\.)(?=.)", "model."),
            *spec.tensor_names,
        ),
    )
    is_parallel = any(name.endswith("mask_hidden") for name in stored)
    # Heads of Speculators add their output to the normed hidden state by default, except P-EAGLE heads.
    adds_to_normed = section is not None and not is_parallel
    return HeadLayout(
        spec,
        _PARTS,
        reads_kept=_reads_inner_states(fields),
        returns_normed=fields.boolean("norm_output", False),
        projects_states=True,
        adds_to_normed=fields.boolean("norm_before_residual", adds_to_normed),
        is_parallel=is_parallel,
        mask_token_id=read_mask_token(fields, target.vocab_size) if is_parallel else 0,
    )


def read_eagle3_inputs(fields: ConfigFields, num_layers: int) -> Sequence[int]:
    """Return the layers of a model with `num_layers` layers whose inputs an EAGLE-3 head reads.

    Raises:
        CheckpointError: The config names layers that the model does not have.
    """
    if not _reads_inner_states(fields):
        return (num_layers,)
    name = "eagle_aux_hidden_state_layer_ids"
    own = fields.first_section("eagle_config")
    # The configs of the first published heads do not name the layers.
    layers = fields.get(name) or own.get(name) or [2, num_layers // 2, num_layers - 3]
    if not isinstance(layers, list) or any(
        not isinstance(layer, int) or not 0 <= layer <= num_layers for layer in layers
    ):
        raise fields.wrong(
            name, f"a list of layers from 0 to {num_layers}, those of the model", layers
        )
    return tuple(layers)


def _reads_inner_states(fields: ConfigFields) -> bool:
    return fields.first_section("eagle_config").boolean("use_aux_hidden_state", True)


def _family(stored: Collection[str]) -> str:
    """Return the architecture of models with the same layers as a head with these tensors."""
    if any(".kv_a_proj_with_mqa." in name for name in stored):
        return "DeepseekV3ForCausalLM"
    if any(".q_norm." in name for name in stored):
        return "Qwen3ForCausalLM"
    return "LlamaForCausalLM"
