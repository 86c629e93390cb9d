"""Find the local checkpoint for a model name: a path, a hub repository or the default model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.files import find_safetensors, has_model_config, read_tensor_names
from ...protocol.checkpoint.gguf import GGUFFile
from ...protocol.checkpoint.gguf_config.mmproj.fields import Mmproj
from ...protocol.config import LoadFormat
from ...protocol.errors import CheckpointError, ConfigError
from ..supervisor.console import Console
from ..tokenizer.converted import tokenizer_json_path
from .default_model import DEFAULT_MODEL, find_packaged_model
from .mmproj_names import choose_mmproj
from .options import ModelOptions

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?::(?P<gguf>.+))?")
_SPLIT_NAME = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_TOWER_TENSOR = re.compile(r"\bembeddings\.patch_embedding\.weight$")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def find_checkpoint(options: ModelOptions, console: Console) -> tuple[str, Path]:
    """Return the model's name and its checkpoint: a directory or a `.gguf` file.

    Raises:
        ConfigError: The model does not exist.
        CheckpointError: The checkpoint is incomplete or not supported.
    """
    model = options.model
    if model is None or model == DEFAULT_MODEL.name:
        if options.revision is not None:
            raise ConfigError("--revision needs a model on the hub; pass its ORG/NAME")
        return DEFAULT_MODEL.name, find_packaged_model(DEFAULT_MODEL, console)
    path = Path(os.path.expanduser(model))
    if path.exists():
        return model, _local_checkpoint(path, options.load_format == LoadFormat.DUMMY)
    match = _HUB_NAME.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"the model {model!r} does not exist: it is neither a local file or directory "
            "nor a hub name of the form ORG/NAME; check the spelling"
        )
    from .hub import fetch_checkpoint, fetch_tokenizer

    if options.load_format == LoadFormat.DUMMY:
        return model, fetch_tokenizer(
            match["repo"],
            revision=options.revision,
            cache_dir=options.download_dir,
            console=console,
        )
    return model, fetch_checkpoint(
        match["repo"],
        gguf=match["gguf"],
        with_mmproj=not options.mmproj,
        with_code=options.trust_remote_code,
        revision=options.revision,
        cache_dir=options.download_dir,
        console=console,
    )


def find_part(name: str, options: ModelOptions, console: Console) -> Path:
    """Return the checkpoint of a part that a model's config names: a directory or a `.gguf` file.

    Raises:
        ConfigError: It does not exist.
    """
    own = msgspec.structs.replace(options, model=name, revision=None, mmproj="none")
    return find_checkpoint(own, console)[1]


def find_tokenizer(options: ModelOptions, checkpoint: Path, console: Console) -> Path:
    """Return the path of the tokenizer: the checkpoint itself, unless `options.tokenizer` is set.

    Raises:
        ConfigError: The tokenizer does not exist.
    """
    name = options.tokenizer
    if name is None and options.tokenizer_revision not in (None, options.revision):
        name = options.model
    if name is None:
        return checkpoint
    path = Path(os.path.expanduser(name))
    if path.exists():
        if options.tokenizer_revision is not None:
            raise ConfigError(
                f"--tokenizer-revision {options.tokenizer_revision} needs a tokenizer on the hub, got {name}"
            )
        return path.absolute()
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"--tokenizer {name} does not exist; use a directory, a file or ORG/NAME")
    from .hub import fetch_tokenizer

    own_revision = options.revision if name == options.model else None
    return fetch_tokenizer(
        match["repo"],
        revision=options.tokenizer_revision or own_revision,
        cache_dir=options.download_dir,
        console=console,
    )


def find_tokenizer_directory(options: ModelOptions, tokenizer_path: Path) -> Path | None:
    """Return the directory of the tokenizer.json; None if the model is served without a tokenizer."""
    return None if options.skip_tokenizer_init else tokenizer_json_path(tokenizer_path).parent


def find_mmproj(options: ModelOptions, checkpoint: Path) -> Path | None:
    """Return the file with the towers of a GGUF model; None if there is none.

    If there are several files next to the model, one with unquantized numbers is chosen.

    Raises:
        ConfigError: The given file does not exist, or the model is not a GGUF file.
    """
    if options.mmproj == "none":
        return None
    if options.mmproj:
        path = Path(os.path.expanduser(options.mmproj)).absolute()
        if checkpoint.suffix != ".gguf":
            raise ConfigError(
                f"--mmproj {options.mmproj}: only GGUF models have an mmproj file; remove the flag"
            )
        if not path.is_file():
            raise ConfigError(
                f"--mmproj {options.mmproj} does not exist; use the path of a file, or none"
            )
        return path
    if checkpoint.suffix != ".gguf":
        return None
    name = choose_mmproj(path.name for path in checkpoint.parent.iterdir())
    return None if name is None else checkpoint.parent / name


def find_towers(
    options: ModelOptions, checkpoint: Path, config: ConfigFields, console: Console
) -> Path | None:
    """Return the file with the towers of a GGUF model, or the directory with a tower that the checkpoint omits.

    Raises:
        ConfigError: The file does not exist, or the model is not a GGUF file.
        CheckpointError: The files of the model and of its tower lack the tower's weights.
    """
    if options.language_model_only:
        return None
    field = config.text("vision_tower_field", "")
    tower = config.text(field, "") if field else ""
    if not tower or checkpoint.suffix == ".gguf":
        return find_mmproj(options, checkpoint)
    return _find_tower(field, tower, checkpoint, options, console)


def read_towers(
    options: ModelOptions, mmproj: Path, path: Path, config: Mapping[str, Any], console: Console
) -> Mmproj | None:
    """Return the towers in a GGUF file; None if it was found beside the model, which cannot use it.

    Raises:
        CheckpointError: The model cannot use the file that the options name.
    """
    # A late import, because few models need it.
    from ...protocol.checkpoint.gguf_config.mmproj.read import read_mmproj

    try:
        return read_mmproj(GGUFFile(mmproj), GGUFFile(path), config)
    except CheckpointError as error:
        if options.mmproj:
            raise
        console.line(f"serving without {mmproj.name}, which was found beside the model: {error}")
        return None


def _find_tower(
    field: str, name: str, checkpoint: Path, options: ModelOptions, console: Console
) -> Path | None:
    """Return the directory of the tower that a field of the config names; None if the checkpoint has its weights."""
    if options.load_format == LoadFormat.DUMMY or _has_tower(checkpoint):
        return None
    reason = "which has no such weights in .safetensors files"
    try:
        found = find_part(name, options, console)
        if found.is_dir() and _has_tower(found):
            return found
    except (CheckpointError, ConfigError) as error:
        reason = f"which cannot be used: {error}"
    raise CheckpointError(
        checkpoint,
        f"the files lack the weights of the vision tower; {field} names {name}, {reason}; "
        f"""use --hf-overrides '{{"{field}": "DIRECTORY"}}' with one that has them, or --language-model-only""",
    )


def _has_tower(checkpoint: Path) -> bool:
    return any(map(_TOWER_TENSOR.search, read_tensor_names(checkpoint)))


def _local_checkpoint(path: Path, needs_config_only: bool) -> Path:
    path = path.absolute()
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.suffix in _WEIGHT_SUFFIXES:
            raise CheckpointError(
                path, f"one weight file is not a checkpoint; use its directory {path.parent}"
            )
        raise CheckpointError(path, "not a model; use a checkpoint's directory or a .gguf file")
    ggufs = _gguf_checkpoints(path)
    if has_model_config(path):
        if needs_config_only or find_safetensors(path):
            return path
        if not ggufs:
            raise CheckpointError(path, _missing_weights(path))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(gguf.name for gguf in ggufs)
        raise CheckpointError(
            path, f"the directory has several GGUF files; use the path of one of {names}"
        )
    raise CheckpointError(
        path,
        "the directory has neither a config.json, nor a params.json, nor a .gguf file; check the path",
    )


def _gguf_checkpoints(directory: Path) -> list[Path]:
    """Return the first file of each GGUF checkpoint.

    `mmproj` files are skipped, because they contain only towers.
    """
    firsts: dict[str, Path] = {}
    for path in sorted(directory.glob("*.gguf")):
        if "mmproj" not in path.name:
            match = _SPLIT_NAME.fullmatch(path.name)
            firsts.setdefault(match[1] if match else path.name, path)
    return list(firsts.values())


def _missing_weights(path: Path) -> str:
    if any(path.glob("*.bin")):
        return (
            "the weights are pickled (*.bin), which can run code when loaded and is not supported; "
            "convert them to .safetensors"
        )
    return "there are no *.safetensors files; download the weights"
