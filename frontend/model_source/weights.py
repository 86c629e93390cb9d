"""Find other weights of a model that is served."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Final

from ...protocol.checkpoint.content_hash import hash_content
from ...protocol.checkpoint.files import find_weight_files, read_model_config
from ...protocol.checkpoint.gguf import GGUFFile
from ...protocol.checkpoint.gguf_config.convert import gguf_to_hf_config
from ...protocol.config import ModelConfig
from ...protocol.config.weights import ReplacedWeights
from ...protocol.errors import ConfigError
from ...protocol.file_identity import identify_files
from ..supervisor.console import Console
from .options import ModelOptions
from .source import find_checkpoint

_COSMETIC: Final = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}
)
"""Fields of a config that may differ between the old and the new checkpoint."""


def find_weights(model: ModelConfig, path: str, version: str = "") -> ReplacedWeights:
    """Return the weights at a path, or on the hub, as an update of a served model.

    Raises:
        ConfigError: They do not exist, or belong to another model.
        CheckpointError: The checkpoint is incomplete or cannot be read.
    """
    options = ModelOptions(model=path, download_dir=model.download_dir, mmproj="none")
    try:
        _, found = find_checkpoint(options, Console())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    served = Path(model.path)
    if (found.suffix == ".gguf") != (served.suffix == ".gguf"):
        raise ConfigError(
            f"{found} is not in the format of {served}: one is a GGUF file, and the other a directory"
        )
    _verify_same_model(_read_config(served), _read_config(found), found)
    own = {str(file) for file in find_weight_files(served)}
    files = identify_files(find_weight_files(found), hash_content)
    # Files beside the checkpoint, such as a projector, stay the same.
    files += tuple(file for file in model.weight_files if file.path not in own)
    return ReplacedWeights(secrets.token_hex(8), str(found), files, version)


def _read_config(path: Path) -> dict[str, Any]:
    if path.suffix == ".gguf":
        return gguf_to_hf_config(GGUFFile(path))
    return dict(read_model_config(path).config)


def _verify_same_model(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    for name in sorted(old.keys() | new.keys()):
        if name not in _COSMETIC and old.get(name) != new.get(name):
            raise ConfigError(
                f"{path} is another model: {name} is {new.get(name)!r} in its config, and {old.get(name)!r} in that of "
                "the served one; start a server with it, or use `engine upgrade`"
            )
