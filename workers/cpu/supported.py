"""The models that a native program cannot run."""

from __future__ import annotations

from ..layers.spec import ModelSpec
from .library import NotSupportedNatively


def check_supported(spec: ModelSpec) -> None:
    """Raise `NotSupportedNatively` if the program has no operation for a part of the model."""
    if features := unsupported_features(spec):
        raise NotSupportedNatively(f"the native CPU backend does not support {features[0]}")


def unsupported_features(spec: ModelSpec) -> list[str]:
    """Return the parts of the model that the program has no operation for."""
    features = {
        "clamped MLPs without a gate": not spec.has_gate and spec.activation == "clamped_swiglu",
        "gated MLPs with xIELU": spec.has_gate and spec.activation == "xielu",
        "heads that differ between layers": any(x.head_dim or x.num_kv_heads for x in spec.layers),
        "keys and values shared by layers": any(x.kv_source is not None for x in spec.layers),
        "norms of values": spec.has_value_norm,
        "MLPs of different sizes": any(x.intermediate_size for x in spec.layers),
        "inputs of layers": spec.per_layer_inputs is not None,
        "scaled layers": spec.has_layer_scales,
        "experts beside an MLP": any(
            x.experts is not None and x.experts.has_own_norms for x in spec.layers
        ),
    }
    return [feature for feature, is_used in features.items() if is_used]
