"""Download checkpoints with huggingface-hub, using its cache, offline mode and token."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, snapshot_download
from tqdm.std import tqdm

from ...protocol.checkpoint.files import PART_FOLDERS
from ...protocol.checkpoint.pooling.sparse import TOKEN_VECTORS_FILE, TOKEN_WEIGHTS_FILE
from ...protocol.errors import CheckpointError, ConfigError
from ..supervisor.console import Console
from .mmproj_names import choose_mmproj

TOKENIZER_FILES = (
    *(
        "*.json",
        "*.jinja",
        "*.spm",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.model",
        "spm.model",
        "spm_char.model",
        "tiktoken.model",
        "cl100k_base.tiktoken",
        "merges.txt",
        "vocab.txt",
        "rwkv_vocab_*.txt",
        "tokenizer.jsonl",
    ),
)
CHECKPOINT_FILES = ("*.safetensors", TOKEN_VECTORS_FILE, TOKEN_WEIGHTS_FILE, *TOKENIZER_FILES)
_MISTRAL_FILES = "consolidated*"
# Those of MMS are for more than a thousand languages.
_LANGUAGE_FILES = "adapter.*"
IGNORED_FILES = ("*/*", _MISTRAL_FILES, _LANGUAGE_FILES)
PREFERRED_QUANTS = ("Q4_K_M", "Q8_0")
_NESTED_FILE = re.compile(
    r"\d+_\w+/(config\.json|model\.safetensors)|additional_chat_templates/[^/]+\.jinja"
    r"|adapters/[^/]+/adapter_(config\.json|model\.safetensors)|qformer_tokenizer/tokenizer(_config)?\.json"
)
# Different versions of huggingface-hub use different HTTP libraries.
_HTTPError = errors.HTTPError  # type: ignore[attr-defined]
_SPLIT_SUFFIX = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")


def fetch_checkpoint(
    repo: str,
    *,
    gguf: str | None,
    with_mmproj: bool = True,
    with_code: bool = False,
    revision: str | None,
    cache_dir: str | None,
    console: Console,
) -> Path:
    """Return the directory of a checkpoint, or its GGUF file.

    Args:
        repo: The repository on the hub.
        gguf: The name or the quantization of a GGUF file in the repository; None prefers safetensors.
        with_mmproj: True to fetch the towers of a GGUF model as well.
        with_code: True to fetch the Python code of the model as well.
        revision: A branch, tag or commit.
        cache_dir: The directory for the files; None for the hub's default cache.
        console: Shows the progress.

    Raises:
        ConfigError: The model does not exist, or the hub cannot be reached and the files are not cached.
    """
    with _readable_errors(repo, revision):
        names = _file_names(repo, revision, cache_dir)
        if gguf is None and any(name.endswith(".safetensors") for name in names):
            wanted = [name for name in names if _is_read(name)]
            if not any(fnmatch(name, "*.safetensors") and "/" not in name for name in wanted):
                # The repository has the model only in Mistral's own format, or its parts in folders.
                others = (_MISTRAL_FILES, *(f"{name}/*.safetensors*" for name in PART_FOLDERS))
                wanted += [name for name in names if any(fnmatch(name, each) for each in others)]
            if with_code:
                wanted += [name for name in names if fnmatch(name, "*.py") and "/" not in name]
            return _snapshot(repo, wanted, (), revision, cache_dir, console)
        files = _choose_gguf(repo, names, gguf)
        mmproj = choose_mmproj(names) if with_mmproj else None
        wanted = files if mmproj is None else [*files, mmproj]
        return _snapshot(repo, wanted, (), revision, cache_dir, console) / files[0]


def fetch_tokenizer(
    repo: str, *, revision: str | None, cache_dir: str | None, console: Console
) -> Path:
    """Return the directory of a repository's tokenizer files.

    Raises:
        ConfigError: The repository does not exist, or the hub cannot be reached and the files are not cached.
    """
    with _readable_errors(repo, revision):
        return _snapshot(repo, TOKENIZER_FILES, IGNORED_FILES, revision, cache_dir, console)


def fetch_adapter(
    repo: str, files: tuple[str, ...], *, cache_dir: str | None, console: Console
) -> Path:
    """Return the directory of a LoRA adapter's files.

    Raises:
        ConfigError: The repository does not exist, or the hub cannot be reached and the files are not cached.
    """
    with _readable_errors(repo, None):
        return _snapshot(repo, files, (), None, cache_dir, console)


def _is_read(name: str) -> bool:
    """Return whether a file in a repository with safetensors belongs to the checkpoint.

    Other folders than those of sentence-transformers' modules, chat templates and adapters hold other formats.
    """
    if "/" in name:
        return _NESTED_FILE.fullmatch(name) is not None
    return any(fnmatch(name, each) for each in CHECKPOINT_FILES) and not any(
        fnmatch(name, each) for each in IGNORED_FILES
    )


def _file_names(repo: str, revision: str | None, cache_dir: str | None) -> list[str]:
    """Return the files of the repository; only the cached ones if the hub cannot be reached."""
    try:
        siblings = HfApi().model_info(repo, revision=revision).siblings or []
    except (errors.OfflineModeIsEnabled, _HTTPError, OSError) as error:
        if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
            raise
        snapshot = snapshot_download(
            repo, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=[]
        )
        return [str(p.relative_to(snapshot)) for p in Path(snapshot).rglob("*") if p.is_file()]
    return [sibling.rfilename for sibling in siblings]


def _choose_gguf(repo: str, names: list[str], wanted: str | None) -> list[str]:
    """Return the files of one GGUF checkpoint, in their order."""
    by_stem: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and "mmproj" not in name:
            by_stem.setdefault(_SPLIT_SUFFIX.sub("", name), []).append(name)
    if not by_stem:
        raise CheckpointError(
            repo,
            "the repository has neither .safetensors nor .gguf files; use another repository",
        )
    if wanted is not None:
        pattern = wanted.lower() if wanted.endswith(".gguf") else f"*{wanted.lower()}.gguf"
        chosen = [s for s in by_stem if fnmatch(s.lower(), pattern) or wanted in by_stem[s]]
    elif len(by_stem) == 1:
        chosen = list(by_stem)
    else:
        chosen = [s for q in PREFERRED_QUANTS for s in by_stem if fnmatch(s, f"*{q}.gguf")][:1]
    if len(chosen) != 1:
        have = ", ".join(sorted(by_stem))
        problem = (
            f"no single GGUF file matches {wanted!r}" if wanted else "there are several GGUF files"
        )
        raise CheckpointError(repo, f"{problem}; choose one of {have} with {repo}:FILE.gguf")
    return by_stem[chosen[0]]


def _snapshot(
    repo: str,
    allow: tuple[str, ...] | list[str],
    ignore: tuple[str, ...],
    revision: str | None,
    cache_dir: str | None,
    console: Console,
) -> Path:
    return Path(
        snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(allow),
            ignore_patterns=list(ignore) or None,
            tqdm_class=_bar_on(console, f"downloading {repo}"),
        )
    )


def _bar_on(console: Console, label: str) -> Any:
    """Return a progress bar class that reports byte counts to the console and prints nothing itself."""

    class ConsoleBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with open(os.devnull, "w") as nowhere:
                super().__init__(*args, **{**kwargs, "file": nowhere, "gui": False})

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            pass

        def close(self) -> None:
            pass

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self.unit == "B" and self.total and self.n:
                console.progress(label, int(self.n), int(self.total))
            return None

    return ConsoleBar


@contextmanager
def _readable_errors(repo: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{repo} is gated: accept its terms on the hub, then set HF_TOKEN to a token from that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{repo} is neither a local path nor a public model on the hub ({constants.ENDPOINT}); "
            "check the spelling, or set HF_TOKEN if it is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{repo} has no revision {revision!r} on the hub; check --revision"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{repo} is neither a local path nor a valid hub name: {error}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.CacheNotFound):
        raise ConfigError(
            f"{repo} is not in the cache ({constants.HF_HUB_CACHE}) and the hub ({constants.ENDPOINT}) "
            "cannot be reached; check the connection and HF_HUB_OFFLINE, or pass a local path"
        ) from None
    except _HTTPError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{repo} cannot be downloaded from the hub: {reason}; try again later"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{repo} cannot be downloaded: {error}; check disk space and network"
        ) from None
