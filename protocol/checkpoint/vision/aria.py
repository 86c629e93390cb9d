"""Read the vision tower of Aria."""

from __future__ import annotations

import math

from ..config_fields import ConfigFields
from .fields import feature_layers, read_sizes
from .idefics3 import SIZES
from .spec import VisionSpec


def aria(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Aria (arXiv 2410.05993), whose images have margins and whose patches are read by queries."""
    sizes = read_sizes(vision, SIZES)
    sizes["feature_layers"] = layers = feature_layers(fields, sizes, -1)
    if len(layers) > 1:
        raise fields.wrong("vision_feature_layer", "one layer", fields.get("vision_feature_layer"))
    counts = _query_counts(fields)
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="queries",
        projection_activation="gelu_new",
        max_outputs=max(count for _, count in counts),
        positions="inverse",
        margins="left out",
        query_counts=counts,
    )


def _query_counts(fields: ConfigFields) -> tuple[tuple[int, int], ...]:
    """Return the pairs (patches of a side, number of queries)."""
    name = "projector_patch_to_query_dict"
    found = fields.get(name, {"1225": 128, "4900": 256})
    if not isinstance(found, dict) or not found:
        raise fields.wrong(name, "numbers of queries by numbers of patches", found)
    section = ConfigFields({str(key): x for key, x in found.items()}, fields.path, f"{name}.")
    counts = []
    for key in section.config:
        side = math.isqrt(int(key)) if key.isdigit() else 0
        if not side or side**2 != int(key):
            raise fields.wrong(name, "square numbers of patches", found)
        counts.append((side, section.integer(key)))
    return tuple(sorted(counts))
