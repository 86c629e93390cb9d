"""The layout of the DSpark heads of DeepSeek-V4 and V4.1, which are stored with the model as `mtp`.

The layers are those of the model without entries: attention to a window, hyper-connections and experts. A head reads
the mean of the model's streams before or after some layers.
"""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec.structs import replace

from .....protocol.errors import CheckpointError
from ....layers.spec import ModelSpec
from ....loaders import Checkpoint
from ....models.families import model_spec
from .block_inputs import block_fields, read_block_inputs
from .head_layout import HeadLayout, headless, read_mask_token

_PARTS: Final = (
    (r"^mtp\.0\.main_proj\.", "projection."),
    (r"^mtp\.0\.main_norm\.", "hidden_norm."),
    (r"^mtp\.\d+\.markov_head\.(embed|markov_w1)\.", "markov.vectors."),
    (r"^mtp\.\d+\.markov_head\.(head|markov_w2)\.", "markov.matrix."),
)


def read_deepseek_block(target: ModelSpec, checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of the head in the checkpoint of a DeepSeek-V4 or V4.1.

    Raises:
        CheckpointError: A field of the config is wrong, or the checkpoint has no such head.
    """
    fields = block_fields(checkpoint)
    if not any(name.startswith("mtp.0.main_proj.") for name in checkpoint.names()):
        raise CheckpointError(
            checkpoint.path, "the checkpoint has no DSpark head (mtp.0.main_proj); use another one"
        )
    read = read_block_inputs(fields, len(target.layers))
    if any(
        layer < len(target.layers) and target.layers[layer].ngram_table is not None
        for layer in read
    ):
        name = "dspark_target_layer_ids"
        raise fields.wrong(name, "layers without embeddings of n-grams", fields.get(name))
    found = (re.match(r"mtp\.(\d+)\.", name) for name in checkpoint.names())
    count = 1 + max(int(match[1]) for match in found if match)
    of_layers: dict[str, Any] = dict(fields.config) | {
        "text_config": None,
        "num_hidden_layers": count,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [0] * count,
        "layer_types": None,
        "mlp_layer_types": None,
        "num_hash_layers": 0,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
        "n_routed_experts": fields.get("dspark_n_routed_experts") or fields.get("n_routed_experts"),
        "num_experts_per_tok": fields.get("dspark_num_experts_per_tok")
        or fields.get("num_experts_per_tok"),
    }
    spec = headless(model_spec(of_layers, fields.path))
    compressed = spec.compressed
    assert compressed is not None
    spec = replace(
        spec,
        tensor_names=(
            (r"^(?!mtp\.).*", ""),
            (r"^mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\..*", ""),
            (rf"^mtp\.{count - 1}\.(norm\.|hc_head_)", r"\1"),
            (r"^mtp\.(\d+)\.", r"layers.\1."),
            *spec.tensor_names,
        ),
    )
    return HeadLayout(
        spec,
        _PARTS,
        reads_kept=True,
        projects_states=True,
        block_size=fields.integer("dspark_block_size"),
        mask_token_id=read_mask_token(fields, target.vocab_size),
        num_seen_before=compressed.window,
        predicts_from_last=True,
        has_markov=True,
    )
