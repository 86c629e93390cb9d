"""A small process that speaks the life-cycle protocol of frontends, cores and workers.

Usage: stand_in_process.py CONFIG NAME BEHAVIOR [ARG]. Its actions are appended to RUN_DIR.events.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import zmq
from engine.protocol.config import EngineConfig, load_config
from engine.protocol.heartbeat import HeartbeatWriter
from engine.protocol.process import StopSignal, exit_with_parent
from engine.protocol.supervisor_messages import Heartbeat, ReplicaAction, ReplicaCommand, Stage
from engine.protocol.transport import StatusReporter


def beat(config: EngineConfig, name: str, heartbeat: Heartbeat) -> None:
    writer = HeartbeatWriter(config, name)
    while True:
        writer.beat(heartbeat)
        time.sleep(0.1)


def main() -> int:
    config_path, name, behavior, *args = sys.argv[1:]
    config = load_config(config_path)
    exit_with_parent(config.run_dir)
    stop = StopSignal()
    if behavior == "deaf":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    run_dir = Path(config.run_dir)
    cores_stopped = run_dir / "cores-stopped"
    # Cores stop before a sleep too; the workers of the next life go on.
    have_slept = cores_stopped.exists()

    def record(event: str) -> None:
        with open(f"{config.run_dir}.events", "a") as file:
            file.write(f"{name} {event}\n")

    context = zmq.Context()
    reporter = StatusReporter(context, config, name)
    reporter.report(Stage.STARTING)
    record("started")
    if behavior == "deaf":
        record("is deaf")
    if behavior == "load":
        for done in (0, 40, 100):
            reporter.report(Stage.LOADING, done=done, total=100)
    elif behavior == "fail":
        reporter.report(Stage.FAILED, args[0])
        reporter.close()
        context.term()
        return 1
    elif behavior == "exit":
        return int(args[0])
    elif behavior == "die":
        os.kill(os.getpid(), signal.Signals[args[0]])
    elif behavior in ("starting", "restarts-a-replica"):
        if behavior == "restarts-a-replica":
            reporter.send_command(ReplicaCommand(int(args[0]), ReplicaAction.RESTART))
            reporter.report(Stage.WARMING, "has asked for a restart")
        while not stop.requested:
            time.sleep(0.005)
        return 0

    def crash_if_told() -> None:
        if behavior == "crash-on-signal" and (
            Path(f"{config.run_dir}.die").exists() or Path(f"{config.run_dir}.die {name}").exists()
        ):
            os.kill(os.getpid(), signal.SIGSEGV)

    # Later lives crash before they are ready: a frontend that crashes afterwards may be restarted without limit.
    crash_if_told()
    if name.startswith("frontend"):
        # A frontend is ready when it has received a token, and therefore when core and worker are ready.
        while not stop.requested and not all(
            (run_dir / f"{other}.ready").exists() for other in ("core 0", "worker 0")
        ):
            time.sleep(0.005)
    else:
        (run_dir / f"{name}.ready").touch()
    reporter.report(Stage.READY)
    heartbeat = Heartbeat(
        busy_s=float(args[0]) if behavior == "busy" else 0.0,
        num_dropped_frames=int(args[0]) if behavior == "has-dropped" else 0,
    )
    threading.Thread(target=beat, args=(config, name, heartbeat), daemon=True).start()
    while behavior == "crash-on-signal" and not stop.requested:
        crash_if_told()
        time.sleep(0.005)
    while behavior == "stubborn" or not stop.requested:
        if name.startswith("worker") and cores_stopped.exists() and not have_slept:
            break
        time.sleep(0.005)
    record("stopped")
    if name.startswith("core"):
        cores_stopped.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
