"""Check that the blocks which a connector has loaded contain only finite numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from ...protocol.arrays import int32_bytes, int32_view
from ...protocol.worker_messages import CheckedLoad, KVConnectorOutput
from .block_memory import BlockMemory
from .block_regions import BlockRegions
from .connector import KVConnector

logger = logging.getLogger(__name__)


class CheckedConnector(KVConnector):
    """Forwards everything to a connector, and adds loaded blocks with NaN or infinity to its invalid blocks.

    These are filled with zeros, because attention multiplies the unused part of a block by 0.

    Args:
        connector: The connector. Its end of a load is trusted: it may not write to the blocks after that.
        memory: The KV cache of the worker.
        regions: The numbers in the blocks.
    """

    def __init__(self, connector: KVConnector, memory: BlockMemory, regions: BlockRegions) -> None:
        self._connector = connector
        self._memory = memory
        self._regions = regions
        self._loads: dict[int, list[CheckedLoad]] = {}
        self._invalid_blocks: list[int] = []
        """The invalid blocks of the synchronous loads of this step."""
        self._has_logged = False

    @property
    def fd(self) -> int:
        """The file descriptor of the connector."""
        return self._connector.fd

    def begin_step(self, metadata: bytes) -> None:
        """Forward the metadata."""
        self._connector.begin_step(metadata)

    def start_loads(self) -> None:
        """Start the loads of the connector."""
        self._connector.start_loads()

    def check_loads(self, loads: Sequence[CheckedLoad]) -> None:
        """Check the synchronous loads of the step, which has not been computed yet, and the others when they end."""
        for load in loads:
            if load.transfer_id is None:
                self._invalid_blocks += self._find_invalid(load)
            else:
                self._loads.setdefault(load.transfer_id, []).append(load)

    def end_step(self) -> KVConnectorOutput | None:
        """Return the connector's report about the step, and the invalid blocks of its synchronous loads."""
        output = self._connector.end_step()
        if output is None and not self._invalid_blocks:
            return None
        invalid_blocks, self._invalid_blocks = self._invalid_blocks, []
        return self._with_invalid(output or KVConnectorOutput(), invalid_blocks)

    def take_reports(self) -> list[KVConnectorOutput]:
        """Return the connector's reports, with the invalid blocks of the loads that have ended."""
        return [self._with_invalid(output, []) for output in self._connector.take_reports()]

    def reset(self) -> None:
        """Discard all transfers."""
        self._connector.epoch = self.epoch
        self._connector.reset()
        self._loads.clear()
        self._invalid_blocks.clear()

    def close(self) -> None:
        """Close the connector."""
        self._connector.close()

    def _with_invalid(
        self, output: KVConnectorOutput, invalid_blocks: list[int]
    ) -> KVConnectorOutput:
        """Return the report with these invalid blocks, and those of the loads that it ends."""
        for transfer_id in output.finished_recving:
            for load in self._loads.pop(transfer_id, ()):
                invalid_blocks += self._find_invalid(load)
        if not invalid_blocks:
            return output
        return replace(
            output, invalid_block_ids=output.invalid_block_ids + int32_bytes(invalid_blocks)
        )

    def _find_invalid(self, load: CheckedLoad) -> list[int]:
        """Return the blocks of a load with NaN or infinity, which are filled with zeros."""
        blocks = int32_view(load.block_ids).tolist()
        has_non_finite = self._regions.find_non_finite(
            load.group, lambda page: self._memory.page_of(blocks, page)
        )
        invalid = [blocks[index] for index in np.flatnonzero(has_non_finite)]
        if invalid:
            self._memory.clear(invalid, self._memory.fence())
            if not self._has_logged:
                self._has_logged = True
                logger.error(
                    "the KV connector has loaded NaN or infinity into %d of %d blocks, which are computed instead; "
                    "this is logged once",
                    len(invalid),
                    len(blocks),
                )
        return invalid
