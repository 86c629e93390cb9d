"""The processes of an engine, and the commands that start them."""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec.structs import replace

from ...protocol.config import EngineConfig
from .local_process import ProcessSpec, Role


def engine_processes(
    config: EngineConfig, config_path: Path, listen_fd: int | None, lock_fd: int | None = None
) -> list[ProcessSpec]:
    """Return the processes of `config` in the order in which they are started.

    Frontends come first: with a small model they take longest, because they load the tokenizer on one processor core.
    Without a `listen_fd` there are no frontends. Frontends inherit `lock_fd`, which holds the lock of the run
    directory.
    """

    def spec(name: str, role: Role, module: str, index: int, *args: int) -> ProcessSpec:
        # -P: a file in the current directory must not shadow a module.
        command = (sys.executable, "-P", "-m", f"engine.{module}", str(config_path))
        argv = command + tuple(map(str, (index, *args)))
        return ProcessSpec(name, role, argv, replica=index)

    def worker(core: int, rank: int) -> ProcessSpec:
        number = core * parallel.workers_per_core + rank
        here = spec(f"worker {number}", Role.WORKER, "workers", core, rank)
        if parallel.is_external or parallel.node_of(number) > 0:
            return replace(here, node=parallel.node_of(number))
        if parallel.spans_nodes(core):
            return replace(here, env=rendezvous_environment(config, core, parallel.master_addr))
        return here

    parallel = config.parallel
    cores = range(parallel.data_parallel_size)
    specs: list[ProcessSpec] = []
    if listen_fd is not None:
        inherited = tuple(fd for fd in (listen_fd, lock_fd) if fd is not None)
        for client in range(parallel.api_server_count):
            frontend = spec(f"frontend {client}", Role.FRONTEND, "frontend", client, listen_fd)
            # numpy's threads would compete with those of the workers.
            specs.append(replace(frontend, pass_fds=inherited, env={"OPENBLAS_NUM_THREADS": "1"}))
    specs += [worker(core, rank) for core in cores for rank in range(parallel.workers_per_core)]
    specs += [spec(f"core {core}", Role.CORE, "core", core) for core in cores]
    if listen_fd is not None:
        specs.append(spec("store", Role.STORE, "frontend.store", 0))
    return specs


def rendezvous_environment(config: EngineConfig, core_index: int, host: str) -> dict[str, str]:
    """Return the environment variables of torch.distributed for a replica that spans machines.

    `host` is the host where its workers connect to each other.
    """
    return {"MASTER_ADDR": host, "MASTER_PORT": str(config.rendezvous_port(core_index))}
