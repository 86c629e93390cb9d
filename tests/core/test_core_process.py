"""The core in a separate process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest
import zmq
from engine.protocol.config import PROTOCOL_VERSION, EngineConfig, ModelConfig
from engine.protocol.messages import ClientHello, CoreReady
from engine.protocol.process import STOP_PROCESS
from engine.protocol.supervisor_messages import Stage
from engine.protocol.transport import Peer, StatusReceiver

pytestmark = pytest.mark.slow

START_TIMEOUT_MS = 30_000
OBSERVED_S = 1.0


@pytest.fixture
def config() -> Iterator[EngineConfig]:
    # Socket addresses have a length limit, which the path of a test's directory may exceed.
    run_dir = tempfile.mkdtemp(prefix="core-")
    model = ModelConfig("m", run_dir, run_dir, ("m",), "llama", 100, 64, (1,))
    yield EngineConfig(run_dir, 1, model)
    shutil.rmtree(run_dir, ignore_errors=True)


def test_a_core_without_its_workers_sleeps_while_a_frontend_waits(config: EngineConfig) -> None:
    with zmq.Context() as context:
        statuses = StatusReceiver(context, config)
        frontend: Peer[CoreReady] = Peer(context, config.core_address(0), b"0", CoreReady)
        command = [sys.executable, "-P", "-m", "engine.core", str(config.save()), "0", "1"]
        core = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            status = statuses.receive(START_TIMEOUT_MS)
            assert status is not None and status.stage is Stage.STARTING
            frontend.send(ClientHello(PROTOCOL_VERSION, 1, 0))
            process = psutil.Process(core.pid)
            before = process.cpu_times()
            time.sleep(OBSERVED_S)
            after = process.cpu_times()
            used = after.user + after.system - before.user - before.system
            assert used < OBSERVED_S / 10
        finally:
            core.send_signal(STOP_PROCESS)
            assert core.wait(20) == 0
            assert core.stdin is not None
            core.stdin.close()
            frontend.close()
            statuses.close()
