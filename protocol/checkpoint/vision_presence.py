"""Find out whether a model has a vision tower, without the modules that read towers."""

from __future__ import annotations

from .config_fields import ConfigFields
from .vision_kind import EMBEDDINGS, SECTIONS, model_kind, vision_section


def has_vision(fields: ConfigFields) -> bool:
    """Return whether a model with this config has a vision tower that Engine supports."""
    if not any(name in fields.config for name in (EMBEDDINGS, *SECTIONS)):
        return False
    # A late import, because most models have no vision tower and need none of the modules.
    from .vision.read import READERS

    return model_kind(fields) in READERS and vision_section(fields) is not None
