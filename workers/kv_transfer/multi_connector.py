"""The worker side of `MultiConnector`, a KV connector that combines several others."""

from __future__ import annotations

import select

import msgspec

from ...protocol.kv_transfer.multi import MULTI_CONNECTOR, MultiCommands, MultiReport, child_configs
from ...protocol.worker_messages import KVConnectorOutput
from .connector import ConnectorContext, KVConnector, create_connector, register_connector


class MultiConnector(KVConnector):
    """Forwards everything to several connectors. A load that several of them share ends when all have ended it."""

    def __init__(self, context: ConnectorContext) -> None:
        self._connectors = [
            create_connector(msgspec.structs.replace(context, transfer=child))
            for child in child_configs(context.transfer)
        ]
        self._epoll = select.epoll()
        for connector in self._connectors:
            self._epoll.register(connector.fd, select.EPOLLIN)
        self._decode = msgspec.msgpack.Decoder(MultiCommands).decode
        self._num_left: dict[int, int] = {}
        """For each load that several connectors share, the number of those that have not ended it."""
        self._reports: list[KVConnectorOutput] = []

    @property
    def fd(self) -> int:
        """A file descriptor that is readable while a connector has reports."""
        return self._epoll.fileno()

    def begin_step(self, metadata: bytes) -> None:
        """Pass its metadata to each connector."""
        if not metadata:
            return
        commands = self._decode(metadata)
        self._num_left.update(commands.loads)
        if commands.lost_blocks:
            # The end of their load, which follows, causes the report to be taken.
            self._reports.append(KVConnectorOutput(invalid_block_ids=commands.lost_blocks))
        for connector, own in zip(self._connectors, commands.metadata, strict=True):
            connector.begin_step(own)

    def start_loads(self) -> None:
        """Start the loads of all connectors, each of which has copied the blocks that the loads may overwrite."""
        for connector in self._connectors:
            connector.start_loads()

    def end_step(self) -> KVConnectorOutput | None:
        """Return nothing, because the combined connectors load asynchronously."""
        for number, connector in enumerate(self._connectors):
            output = connector.end_step()
            if output is not None:
                self._reports.append(self._combine(number, output))
        return None

    def take_reports(self) -> list[KVConnectorOutput]:
        """Return the reports of all connectors since the last call."""
        reports, self._reports = self._reports, []
        for number, connector in enumerate(self._connectors):
            reports += [self._combine(number, output) for output in connector.take_reports()]
        return reports

    def _combine(self, number: int, output: KVConnectorOutput) -> KVConnectorOutput:
        """Return a report with only those loads that have ended in all connectors."""
        received = []
        for transfer_id in output.finished_recving:
            left = self._num_left.get(transfer_id, 1) - 1
            if left:
                self._num_left[transfer_id] = left
            else:
                self._num_left.pop(transfer_id, None)
                received.append(transfer_id)
        data = output.data and msgspec.msgpack.encode(MultiReport(number, output.data))
        return msgspec.structs.replace(output, finished_recving=received, data=data)

    def reset(self) -> None:
        """Discard all transfers."""
        self._num_left.clear()
        self._reports.clear()
        for connector in self._connectors:
            connector.epoch = self.epoch
            connector.reset()

    def close(self) -> None:
        """Close all connectors."""
        for connector in self._connectors:
            connector.close()
        self._epoll.close()


register_connector(MULTI_CONNECTOR, MultiConnector)
