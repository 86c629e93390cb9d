"""The configuration that every process of one engine shares.

The supervisor builds one `EngineConfig` and writes it into the run directory. Every other process reads it from there,
so that no two processes can disagree. A field that is annotated with `option` is an option of the command line.
"""

from pathlib import Path
from typing import Final

import msgspec

from ..errors import RunDirectoryError
from .cache import CacheConfig, KVEventsConfig, KVTransferConfig, LoadFailurePolicy, PrefixHash
from .device import CPUBackend, Device, DeviceConfig
from .frontend import FrontendConfig, MediaReading
from .hidden_states import HiddenStatesConfig
from .model import LoadFormat, ModelConfig, ModelImpl
from .parallel import ExecutorBackend, ParallelConfig, ReplicaRole
from .recovery import RecoveryConfig
from .scheduler import (
    PreemptionMode,
    ProposerMethod,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
)
from .store import StoreConfig
from .weights import WeightsFiles

__all__ = [
    "ANY_MODEL",
    "CONFIG_FILE",
    "FIRST_EPOCH",
    "PROTOCOL_VERSION",
    "CPUBackend",
    "CacheConfig",
    "Device",
    "DeviceConfig",
    "EngineConfig",
    "ExecutorBackend",
    "FrontendConfig",
    "HiddenStatesConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoadFailurePolicy",
    "LoadFormat",
    "MediaReading",
    "ModelConfig",
    "ModelImpl",
    "ParallelConfig",
    "PreemptionMode",
    "PrefixHash",
    "ProposerMethod",
    "RecoveryConfig",
    "ReplicaRole",
    "SchedulerConfig",
    "SchedulingPolicy",
    "SpeculativeConfig",
    "StoreConfig",
    "load_config",
    "load_updated_config",
]

PROTOCOL_VERSION: Final = 13
"""Raised whenever a message or this configuration changes its encoding."""

FIRST_EPOCH: Final = 1

CONFIG_FILE: Final = "config.msgpack"

ANY_MODEL: Final = "default"
"""The name that clients of SGLang send for the model of the server, whatever it is."""


class EngineConfig(msgspec.Struct, frozen=True):
    """The configuration of one engine.

    Attributes:
        run_dir: A directory with mode 0700 for the sockets of this engine.
        epoch: The number of times that this replica or frontend was started. Only this field differs between processes;
            each process receives it on its command line.
        takes_over: True if another engine accepts connections until the frontends of this one are ready.
    """

    run_dir: str
    epoch: int
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    frontend: FrontendConfig = FrontendConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    kv_transfer: KVTransferConfig | None = None
    store: StoreConfig = StoreConfig()
    takes_over: bool = False
    version: int = PROTOCOL_VERSION

    def core_address(self, core_index: int) -> str:
        """Return the address at which frontends reach a core (ROUTER)."""
        return f"ipc://{self.run_dir}/core{core_index}"

    def worker_address(self, core_index: int) -> str:
        """Return the address at which the workers of a core reach it (ROUTER)."""
        if self.parallel.is_distributed:
            return self.parallel.master_address(1 + core_index)
        return f"ipc://{self.run_dir}/core{core_index}.workers"

    def kv_address(self, core_index: int, rank: int) -> str:
        """Return the address at which a worker offers KV blocks to other replicas on its machine (ROUTER)."""
        return f"ipc://{self.run_dir}/kv{core_index}.{rank}"

    def store_address(self) -> str:
        """Return the address at which frontends reach the store (ROUTER)."""
        return f"ipc://{self.run_dir}/store"

    def connections_path(self) -> str:
        """Return the Unix socket at which the store holds copies of clients' connections."""
        return f"{self.run_dir}/connections"

    def step_log_path(self, core_index: int) -> str | None:
        """Return the file of the messages that a core sends to several workers; None if not all of them can read it."""
        parallel = self.parallel
        if parallel.workers_per_core == 1 or not parallel.shares_machine(core_index):
            return None
        return f"{self.run_dir}/core{core_index}.steps"

    def heartbeat_path(self, process: str) -> str:
        """Return the file of the heartbeats of a process; see `heartbeat`."""
        return f"{self.run_dir}/{process.replace(' ', '')}.heartbeat"

    def supervisor_address(self) -> str:
        """Return the address to which every process reports its stages (PULL)."""
        return f"ipc://{self.run_dir}/supervisor"

    def status_address(self) -> str:
        """Return the address at which the supervisor says that the state of a process has changed (PUB)."""
        return f"ipc://{self.run_dir}/status"

    def status_path(self) -> str:
        """Return the file in which the supervisor publishes the state of every process."""
        return f"{self.run_dir}/status.record"

    def rendezvous_address(self, core_index: int) -> str:
        """Return the `init_method` of torch.distributed for the workers of one core, or of a group of cores.

        Workers must not find the rendezvous of an earlier epoch. On one machine each epoch has its own file. On several
        machines environment variables name the address, and the rendezvous there ends with the first worker.
        """
        if self.parallel.spans_nodes(core_index):
            return "env://"
        group = self.parallel.group_of(core_index)
        return f"file://{self.run_dir}/core{group}.{self.epoch}.rendezvous"

    def rendezvous_port(self, core_index: int) -> int:
        """Return the port on which the first worker of a replica on several machines listens for the others."""
        parallel = self.parallel
        return (
            parallel.master_port + 1 + parallel.data_parallel_size + parallel.group_of(core_index)
        )

    def save(self) -> Path:
        """Write the configuration into its run directory, readable only by the owner.

        Raises RunDirectoryError if that fails.
        """
        path = Path(self.run_dir) / CONFIG_FILE
        try:
            path.touch(mode=0o600)
            path.write_bytes(msgspec.msgpack.encode(self))
        except OSError as error:
            raise RunDirectoryError(path, error.strerror) from None
        return path


def load_config(path: str | Path, epoch: int | None = None) -> EngineConfig:
    """Read a configuration that `EngineConfig.save` wrote and set its epoch.

    Raises msgspec.DecodeError if it is invalid.
    """
    config = msgspec.msgpack.decode(Path(path).read_bytes(), type=EngineConfig)
    if config.version != PROTOCOL_VERSION:
        raise msgspec.ValidationError(
            f"{path}: configuration version {config.version}, expected "
            f"{PROTOCOL_VERSION}; restart the server"
        )
    return config if epoch is None else msgspec.structs.replace(config, epoch=epoch)


def load_updated_config(path: str | Path, epoch: int) -> EngineConfig:
    """Read a configuration as `load_config` does, and apply the last update of the weights to it."""
    config = load_config(path, epoch)
    model = WeightsFiles(config.run_dir).read_current().apply(config.model)
    return msgspec.structs.replace(config, model=model)
