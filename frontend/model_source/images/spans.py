"""Find the tokens of a prompt that attend to later tokens."""

from __future__ import annotations

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.pooling.embedding import text_spans
from ....protocol.checkpoint.vision_presence import has_vision
from ....protocol.config.images.settings import SpanKind
from ....protocol.config.model import ModelImpl
from ..options import ModelOptions


def find_span_kind(
    options: ModelOptions, config: ConfigFields, text: ConfigFields
) -> SpanKind | None:
    """Return the spans of a prompt in which tokens attend to later tokens; None for causal attention only."""
    if options.model_impl is ModelImpl.TRANSFORMERS:
        return None
    if not has_vision(config):
        return text_spans(config)
    # A late import, because a model without vision needs none of its modules.
    from ....protocol.checkpoint.vision.read import vision_spec

    return vision_spec(config, text.integer("hidden_size")).span_kind
