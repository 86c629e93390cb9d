"""GIT (arXiv 2205.14100), a decoder with the layers of BERT, whose prompts begin with an image."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.vision.llava import git
from ....layers.spec import ModelSpec
from ..common import Family
from ..with_encoders.absolute import BERT_NAMES, bert


def _git(fields: ConfigFields) -> ModelSpec:
    # Positions are counted from the end of the image, which has none.
    size, vision = fields.integer("hidden_size"), fields.first_section("vision_config")
    num_first = git(fields, vision, size).num_outputs
    own = (
        # Published files misspell the embeddings of the frames of videos.
        (r"^git\.(image_encoder|visual_projection|img_temp[eo]ral_embedding)\..*", ""),
        (r"^output\.", "lm_head."),
        (r"^git\.", ""),
    )
    return replace(
        bert(fields),
        is_causal=True,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        head_bias=True,
        num_token_types=0,
        num_positions=num_first + fields.integer("max_position_embeddings"),
        num_unplaced=num_first,
        places_after_norm=True,
        max_position_embeddings=num_first + fields.integer("max_position_embeddings"),
        tensor_names=(*own, *BERT_NAMES[1:]),
    )


FAMILIES = (Family("GitForCausalLM", "git", _git),)
