"""The layers of a model whose hidden states a DFlash or DSpark head reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .....protocol.checkpoint.config_fields import ConfigFields
from ....loaders import Checkpoint

_DEEPSEEK_4_1: Final = "DeepseekV41ForCausalLM"
_DEEPSEEK: Final = ("DeepseekV4ForCausalLM", _DEEPSEEK_4_1)


def block_fields(checkpoint: Checkpoint) -> ConfigFields:
    """Return the config of a DFlash or DSpark head, with the fields of its section for text."""
    fields = ConfigFields(checkpoint.config, checkpoint.config_path)
    return fields.with_values(fields.section_or_empty("text_config").config)


def is_deepseek(fields: ConfigFields) -> bool:
    """Return whether the head is stored with a DeepSeek-V4 or V4.1."""
    return any(name in _DEEPSEEK for name in fields.texts("architectures"))


def read_block_inputs(fields: ConfigFields, num_layers: int) -> Sequence[int]:
    """Return the layers of a model with `num_layers` layers whose inputs a DFlash or DSpark head reads.

    Raises:
        CheckpointError: The config names layers that the model does not have.
    """
    own = fields.first_section("dflash_config")
    # Other configs count the outputs of layers, each of which is the input of the next one.
    reads_inputs = _DEEPSEEK_4_1 in fields.texts("architectures")
    name, read, offset = "target_layer_ids", own.get("target_layer_ids"), 1
    for other in ("target_layer_ids", "dspark_target_layer_ids"):
        if read is None:
            name, read, offset = other, fields.get(other), int(not reads_inputs)
    if read is None:
        # The config of the library Speculators counts the hidden states, beginning with the embedding.
        name, read, offset = (
            "aux_hidden_state_layer_ids",
            fields.get("aux_hidden_state_layer_ids"),
            0,
        )
    if read is None:
        count = fields.layer_count("num_hidden_layers")
        name, read, offset = "target_layer_ids", _spread(num_layers, count), 1
    last = num_layers - offset
    if (
        not isinstance(read, list)
        or not read
        or any(not isinstance(layer, int) or not 0 <= layer <= last for layer in read)
    ):
        raise fields.wrong(name, f"a list of layers from 0 to {last}, those of the model", read)
    return tuple(layer + offset for layer in read)


def _spread(num_layers: int, count: int) -> list[int]:
    """Return `count` layers at equal distances, from the second one to the third last one."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
