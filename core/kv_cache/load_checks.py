"""Name the blocks that a connector from a module loads, so that the workers check the numbers in them."""

from __future__ import annotations

from ...protocol.arrays import int32_bytes
from ...protocol.block_hash import HASH_BYTES
from ...protocol.config import KVTransferConfig
from ...protocol.kv_transfer.multi import needs_checks
from ...protocol.worker_messages import CheckedLoad, SchedulerOutput
from .block_tables import RequestBlocks
from .external_load import ExternalLoad


class LoadChecks:
    """Collects the blocks of the loads that the next step starts. It collects none if the loads need no checks."""

    def __init__(self, config: KVTransferConfig, block_size: int) -> None:
        self._are_needed = needs_checks(config)
        self._block_size = block_size
        self._loads: list[CheckedLoad] = []

    def add_synchronous(self, blocks: list[int], num_computed: int, num_tokens: int) -> None:
        """Add a load of the `num_tokens` tokens after the computed ones into the blocks of a request."""
        if self._are_needed:
            loaded = self._loaded_blocks(blocks, num_computed, num_tokens)
            self._loads.append(CheckedLoad(int32_bytes(loaded)))

    def add_asynchronous(self, load: ExternalLoad, tables: RequestBlocks) -> None:
        """Add a load that takes any time."""
        if not self._are_needed:
            return
        by_group: dict[int, list[int]] = {}
        for key, block in zip(load.keys, load.blocks, strict=True):
            group = key[HASH_BYTES] if len(key) > HASH_BYTES else 0
            by_group.setdefault(group, []).append(block)
        if not load.keys:
            num_computed = load.num_tokens - load.num_external
            by_group[0] = self._loaded_blocks(tables[0], num_computed, load.num_external)
        transfer_id = load.request.transfer_id
        for group, blocks in by_group.items():
            self._loads.append(CheckedLoad(int32_bytes(blocks), transfer_id, group))

    def add_to_step(self, step: SchedulerOutput) -> None:
        """Move the loads to a step."""
        if self._loads:
            step.checked_loads, self._loads = self._loads, []

    def _loaded_blocks(self, blocks: list[int], num_computed: int, num_tokens: int) -> list[int]:
        size = self._block_size
        return blocks[num_computed // size : -(-(num_computed + num_tokens) // size)]
