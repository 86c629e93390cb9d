"""Read how texts are embedded by models that embed images as well (CLIP, SigLIP)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from ...config.model import DenseActivation, DenseConfig, PoolerConfig, TextChangesConfig
from ...pooling_params import PoolingKind
from ..config_fields import ConfigFields
from ..files import find_tensor
from .late_interaction import named_token

_Reader: TypeAlias = Callable[[Path, ConfigFields, ConfigFields], PoolerConfig]
"""Function from the directory of a checkpoint, the fields of its text encoder and those of the whole model."""


def text_beside_images(config: ConfigFields) -> _Reader | None:
    """Return the function that reads how a model embeds texts; None if it does not embed images."""
    found = (_READERS[name] for name in config.texts("architectures") if name in _READERS)
    return next(found, None)


def _clip(path: Path, config: ConfigFields, whole: ConfigFields) -> PoolerConfig:
    """Return the pooler of CLIP: a product of the hidden state of the last token, which ends a text."""
    size = whole.integer("projection_dim", 512)
    return _projected(path, config, size, "text_projection", has_bias=False)


def _siglip(path: Path, config: ConfigFields, whole: ConfigFields) -> PoolerConfig:
    """Return the pooler of SigLIP, as CLIP's. Texts are filled to the length that the model was trained for."""
    size = config.integer("projection_size", config.integer("hidden_size"))
    images = whole.required_section("vision_config").integer("hidden_size", 768)
    if images != size:
        raise config.error(
            f"projection_size {size} must be {images}, the size of the vectors of images"
        )
    filled = TextChangesConfig(
        expanded_length=config.integer("max_position_embeddings"),
        expansion_token=named_token(path, ("pad_token",), "which fills texts"),
        expands_all=True,
        attends_to_expansion=True,
    )
    return _projected(path, config, size, "text_model.head", has_bias=True, changes=filled)


def _projected(
    path: Path,
    config: ConfigFields,
    size: int,
    module: str,
    *,
    has_bias: bool,
    changes: TextChangesConfig | None = None,
) -> PoolerConfig:
    weights = find_tensor(path, f"{module}.weight")
    hidden_size = config.integer("hidden_size")
    dense = DenseConfig(str(weights), hidden_size, size, has_bias, DenseActivation.IDENTITY, module)
    return PoolerConfig(PoolingKind.LAST, True, size, (dense,), text_changes=changes)


_READERS: Final[dict[str, _Reader]] = {"CLIPModel": _clip, "SiglipModel": _siglip}
