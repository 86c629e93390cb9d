"""Track which encoder outputs the workers hold, by content hash."""

from __future__ import annotations

from collections import OrderedDict


class EncoderCacheManager:
    """Accounts for the encoder outputs in the workers, up to `cache_size` embeddings.

    Unreferenced outputs stay until evicted.
    """

    def __init__(self, cache_size: int) -> None:
        self.num_unused = cache_size
        self._sizes: dict[bytes, int] = {}
        self._ref_counts: dict[bytes, int] = {}
        self._unreferenced: OrderedDict[bytes, int] = OrderedDict()
        self._stale: set[bytes] = set()
        self._freed: list[bytes] = []

    @property
    def num_available(self) -> int:
        """Number of embeddings that would fit after evicting every unreferenced output."""
        return self.num_unused + sum(self._unreferenced.values())

    @property
    def num_referenced(self) -> int:
        """Return whether the workers will hold an output once all steps sent so far have run."""
        return len(self._ref_counts)

    def has_output(self, content_hash: bytes) -> bool:
        """Return whether the workers hold an output once the steps sent so far have run."""
        return content_hash in self._sizes and content_hash not in self._stale

    def get_size(self, content_hash: bytes, size: int) -> int:
        """Return the embeddings that an output takes: its cached size, or `size` if it is not cached."""
        return self._sizes.get(content_hash, size)

    def is_referenced(self, content_hash: bytes) -> bool:
        """Return whether a running request uses an output."""
        return content_hash in self._ref_counts

    def keep_output(self, content_hash: bytes) -> None:
        """Protect an unreferenced output from eviction until it is referenced."""
        if self._unreferenced.pop(content_hash, None) is not None:
            self._ref_counts[content_hash] = 0

    def add_reference(self, content_hash: bytes, size: int) -> bool:
        """Add a reference.

        Return True if the workers must compute or load the output; the caller has checked that it fits.
        """
        is_missing = not self.has_output(content_hash)
        self._stale.discard(content_hash)
        self.keep_output(content_hash)
        if content_hash not in self._sizes:
            while self.num_unused < size:
                self._free(self._unreferenced.popitem(last=False)[0])
            self._sizes[content_hash] = size
            self.num_unused -= size
        self._ref_counts[content_hash] = self._ref_counts.get(content_hash, 0) + 1
        return is_missing

    def remove_reference(self, content_hash: bytes) -> None:
        """Remove a reference. An output without references may be evicted."""
        self._ref_counts[content_hash] -= 1
        if self._ref_counts[content_hash]:
            return
        del self._ref_counts[content_hash]
        if content_hash in self._stale:
            self._stale.remove(content_hash)
            self._free(content_hash)
        else:
            self._unreferenced[content_hash] = self._sizes[content_hash]

    def invalidate_output(self, content_hash: bytes) -> None:
        """Mark an output as possibly wrong, so that the next request that needs it computes it again."""
        if content_hash in self._ref_counts:
            self._stale.add(content_hash)
        elif self._unreferenced.pop(content_hash, None) is not None:
            self._free(content_hash)

    def take_freed(self) -> list[bytes]:
        """Return the hashes of the outputs evicted since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def _free(self, content_hash: bytes) -> None:
        self.num_unused += self._sizes.pop(content_hash)
        self._freed.append(content_hash)
