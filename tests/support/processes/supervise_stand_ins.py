"""A supervisor process over stand-in processes, as `engine serve` runs one over the real ones.

Usage: supervise_stand_ins.py DIRECTORY SHUTDOWN_TIMEOUT NAME=BEHAVIOR[:ARG]...; prints its children's ids when ready.
"""

import os
import sys

from engine.frontend.cli.serve import run_until_stopped
from engine.frontend.supervisor.console import Console
from engine.frontend.supervisor.run_dir import RunDirectory
from engine.frontend.supervisor.signals import StopRequested, StopSignals
from engine.frontend.supervisor.supervisor import Supervisor
from engine.protocol.errors import EngineError
from stand_ins import make_config, make_specs


class AnnouncingConsole(Console):
    """A console that also prints the children's ids and the run directory to standard output when they are ready."""

    supervisor: Supervisor
    run_dir: str

    def line(self, text: str) -> None:
        super().line(text)
        if text == "ready":
            print(self.run_dir, *self.supervisor.pids.values(), flush=True)


def main() -> int:
    directory, shutdown_timeout, *behaviors = sys.argv[1:]
    os.environ["XDG_RUNTIME_DIR"] = directory
    console = AnnouncingConsole()
    with StopSignals() as signals, RunDirectory() as run_dir:
        config = make_config(run_dir.path, shutdown_timeout_s=float(shutdown_timeout))
        specs = make_specs(config, dict(b.split("=") for b in behaviors))
        try:
            with Supervisor(config, specs, signals=signals) as supervisor:
                console.supervisor, console.run_dir = supervisor, run_dir.path
                run_until_stopped(
                    supervisor, console, lambda: console.line("ready"), lambda notice: None
                )
        except StopRequested as stop:
            return 128 + stop.signum
        except EngineError as error:
            console.error(str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
