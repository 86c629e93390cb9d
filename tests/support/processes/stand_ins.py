"""Process specifications that start `stand_in_process.py` in place of an engine's processes."""

import sys
from pathlib import Path

from engine.frontend.supervisor.supervisor import ProcessSpec, Role
from engine.protocol.config import EngineConfig, FrontendConfig, ModelConfig

PROGRAM = Path(__file__).with_name("stand_in_process.py")


def make_config(run_dir: str, *, shutdown_timeout_s: float = 5.0) -> EngineConfig:
    model = ModelConfig("m", "/m", "/m", ("m",), "llama", 32, 64, (0,))
    frontend = FrontendConfig(shutdown_timeout_s=shutdown_timeout_s)
    return EngineConfig(run_dir=run_dir, epoch=1, model=model, frontend=frontend)


def make_specs(config: EngineConfig, behaviors: dict[str, str]) -> list[ProcessSpec]:
    """Return one process for each item like "frontend 0": "ready" or "store": "ready".

    A behavior's argument follows after a colon.
    """
    path = str(config.save())
    specs = []
    for name, behavior in behaviors.items():
        role = Role[name.split()[0].upper()]
        argv = (sys.executable, str(PROGRAM), path, name, *behavior.split(":", 1))
        number = name.partition(" ")[2]
        specs.append(ProcessSpec(name, role, argv, replica=int(number or 0)))
    return specs
