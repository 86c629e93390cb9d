"""A poll wakes up when a device has finished an output."""

from __future__ import annotations

import select
import threading

from engine.protocol.worker_messages import ModelRunnerOutput
from engine.workers.execution.device_watch import DeviceWatch

TIMEOUT_S = 20.0


class Output:
    """An output that becomes ready, or fails, when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done = threading.Event()
        self._error = error

    def is_ready(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()
        if self._error is not None:
            raise self._error

    def output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(1)


def is_readable(watch: DeviceWatch, timeout_s: float) -> bool:
    return bool(select.select([watch.fd], [], [], timeout_s)[0])


def test_the_descriptor_is_readable_once_for_each_output() -> None:
    watch = DeviceWatch()
    for _ in range(3):
        output = Output()
        watch.watch_output(output)
        watch.watch_output(output)
        assert not is_readable(watch, 0.0)
        output.done.set()
        assert is_readable(watch, TIMEOUT_S)
        watch.clear()
        assert not is_readable(watch, 0.0)


def test_a_device_failure_wakes_the_poll_and_later_outputs_are_still_watched() -> None:
    watch = DeviceWatch()
    for output in (Output(RuntimeError("the device is gone")), Output()):
        watch.watch_output(output)
        output.done.set()
        assert is_readable(watch, TIMEOUT_S)
        watch.clear()
