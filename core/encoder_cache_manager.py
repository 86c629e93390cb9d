"""Which encoder outputs the workers hold, by the hash of what they were made of."""

from __future__ import annotations

from collections import OrderedDict


class EncoderCacheManager:
    """At most `cache_size` embeddings. An output without references stays until its space is needed."""

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_unused = cache_size
        self._sizes: dict[bytes, int] = {}
        self._ref_counts: dict[bytes, int] = {}
        self._unreferenced: OrderedDict[bytes, int] = OrderedDict()
        self._stale: set[bytes] = set()
        self._freed: list[bytes] = []

    @property
    def num_available(self) -> int:
        """How many embeddings fit if everything without a reference is evicted."""
        return self.num_unused + sum(self._unreferenced.values())

    def has(self, content_hash: bytes) -> bool:
        """Whether the workers hold an output, or will when the steps sent so far have run."""
        return content_hash in self._sizes and content_hash not in self._stale

    def size_of(self, content_hash: bytes, size: int) -> int:
        """The room that an output takes: what it took when it came in, or `size`."""
        return self._sizes.get(content_hash, size)

    def is_referenced(self, content_hash: bytes) -> bool:
        return content_hash in self._ref_counts

    def revive(self, content_hash: bytes) -> None:
        """Keep an output without references from being evicted, because it will be referred to."""
        if self._unreferenced.pop(content_hash, None) is not None:
            self._ref_counts[content_hash] = 0

    def refer(self, content_hash: bytes, size: int) -> bool:
        """Take a reference. True when the output must be brought in, for which there must be room."""
        is_missing = not self.has(content_hash)
        self._stale.discard(content_hash)
        self.revive(content_hash)
        if content_hash not in self._sizes:
            while self.num_unused < size:
                self._free(self._unreferenced.popitem(last=False)[0])
            self._sizes[content_hash] = size
            self.num_unused -= size
        self._ref_counts[content_hash] = self._ref_counts.get(content_hash, 0) + 1
        return is_missing

    def release(self, content_hash: bytes) -> None:
        """Drop a reference."""
        self._ref_counts[content_hash] -= 1
        if self._ref_counts[content_hash]:
            return
        del self._ref_counts[content_hash]
        if content_hash in self._stale:
            self._stale.remove(content_hash)
            self._free(content_hash)
        else:
            self._unreferenced[content_hash] = self._sizes[content_hash]

    def distrust(self, content_hash: bytes) -> None:
        """An output may be wrong: the next request that needs it brings it in again."""
        if content_hash in self._ref_counts:
            self._stale.add(content_hash)
        elif self._unreferenced.pop(content_hash, None) is not None:
            self._free(content_hash)

    def take_freed(self) -> list[bytes]:
        """What has left the cache since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def _free(self, content_hash: bytes) -> None:
        self.num_unused += self._sizes.pop(content_hash)
        self._freed.append(content_hash)
