"""Reads the weights of a decoder from a checkpoint, by name, with every shape checked."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...protocol.errors import CheckpointError
from ..loaders.checkpoint import Checkpoint

ProgressCallback = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes) as weights arrive."""

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


class WeightReader:
    """The text decoder's tensors, under whatever prefix the checkpoint keeps them.

    `has_head` says whether the output projection is a tensor of its own.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_head: bool,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._names = set(checkpoint.names())
        embedding = next((name for name in sorted(self._names) if name.endswith(_EMBEDDING)), None)
        if embedding is None:
            raise self._error(f"there is no tensor named '...{_EMBEDDING}'")
        self._prefix = embedding.removesuffix(_EMBEDDING)
        self._unread = {
            name
            for name in self._names
            if name.startswith(self._prefix) and not name.endswith("rotary_emb.inv_freq")
        }
        self._head = next((name for name in sorted(self._names) if name.endswith(_HEAD)), _HEAD)
        self._unread.discard(self._head)
        if has_head and self._head in self._names:
            self._unread.add(self._head)
        self._on_progress = on_progress
        self._loaded = 0
        self._total = sum(self._size(name) for name in self._unread)

    def read(self, name: str, *shape: int) -> Tensor:
        """Return the decoder's tensor `name`, e.g. "layers.0.mlp.up_proj.weight"."""
        return self._read(self._prefix + name, shape)

    def read_fused(self, names: list[str], out_features: list[int], *rest: int) -> Tensor:
        """Return several tensors that differ in their first dimension as one."""
        parts = [self.read(name, out, *rest) for name, out in zip(names, out_features, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_head(self, vocab_size: int, hidden_size: int) -> Tensor:
        """Return the output projection of a model that does not tie it to the embedding."""
        return self._read(self._head, (vocab_size, hidden_size))

    def finish(self) -> None:
        """Refuse a checkpoint with tensors that the decoder has no use for: it is another model."""
        if self._unread:
            raise self._error(
                f"{len(self._unread)} tensors do not belong to a model of this configuration, "
                f"the first is {min(self._unread)!r}"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._names:
            raise self._error(f"the tensor {name!r} is missing")
        found = tuple(self.checkpoint.shape(name))
        if found != shape:
            raise self._error(
                f"the tensor {name!r} has shape {list(found)}, the config needs {list(shape)}"
            )
        tensor = self.checkpoint.tensor(name, self.dtype).to(self.device)
        self._unread.discard(name)
        self._loaded += self._size(name)
        if self._on_progress is not None:
            self._on_progress(self._loaded, self._total)
        return tensor

    def _size(self, name: str) -> int:
        return math.prod(self.checkpoint.shape(name)) * self.dtype.itemsize

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(self.checkpoint.path, problem)
