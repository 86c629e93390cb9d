"""MiniCPM-V and MiniCPM-o in the format of their authors, whose decoder depends on the version."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.vision.tiled.minicpm import check_version
from ....layers.spec import ModelSpec
from ..common import Family
from ..llama import llama, qwen2, qwen3

_NAMES = ((r"^llm\.", ""),)
_DECODERS = {"2.5": llama, "2.6": qwen2, "4.0": llama, "4.5": qwen3}


def _minicpmv(fields: ConfigFields) -> ModelSpec:
    return replace(_DECODERS[check_version(fields)](fields), tensor_names=_NAMES)


FAMILIES = (
    Family("MiniCPMV", "minicpmv", _minicpmv),
    Family("MiniCPMO", "minicpmo", _minicpmv),
)
