"""Combine the reports of all workers on asynchronous KV transfers."""

from __future__ import annotations

from collections import Counter

import msgspec

from ....protocol.worker_messages import KVConnectorOutput, KVConnectorReport


class TransferEnds:
    """Counts the workers that have reported the end of each transfer. A transfer has ended when all of them have."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def add_report(self, report: KVConnectorReport) -> KVConnectorOutput:
        """Return a worker's report, reduced to the transfers that have now ended in all workers."""
        output = report.output
        if self._num_workers == 1:
            return output
        return msgspec.structs.replace(
            output,
            finished_sending=self._count(self._sent, output.finished_sending),
            finished_recving=self._count(self._received, output.finished_recving),
        )

    def _count(self, ends: Counter[int], transfer_ids: list[int]) -> list[int]:
        ended = []
        for transfer_id in transfer_ids:
            ends[transfer_id] += 1
            if ends[transfer_id] == self._num_workers:
                del ends[transfer_id]
                ended.append(transfer_id)
        return ended
