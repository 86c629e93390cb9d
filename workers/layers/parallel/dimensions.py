"""The sizes of a model that determine how workers can divide it."""

from ....protocol.checkpoint.model_dimensions import ModelDimensions
from ..spec import ModelSpec


def model_dimensions(spec: ModelSpec) -> ModelDimensions:
    """Return the sizes that determine how the model can be divided among workers."""
    return ModelDimensions(
        len(spec.layers),
        spec.num_heads,
        spec.num_kv_heads,
        spec.intermediate_size,
        spec.vocab_size,
        min((layer.experts.num_experts for layer in spec.layers if layer.experts), default=0),
        next((layer.recurrent.num_units for layer in spec.layers if layer.recurrent), 0),
    )
