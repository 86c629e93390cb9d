"""The number of processes of one engine, and the machines that they run on."""

import enum
from functools import partial
from typing import Annotated

import msgspec

from .option import option

machines = partial(option, group="several machines")


class ExecutorBackend(enum.StrEnum):
    """The program that starts the workers: each node's supervisor (`mp`), or a launcher such as torchrun."""

    MP = "mp"
    EXTERNAL_LAUNCHER = "external_launcher"


class ReplicaRole(enum.StrEnum):
    """The work that a replica does: computing long prompts (`prefill`), generating tokens (`decode`), or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class ParallelConfig(msgspec.Struct, frozen=True):
    """The number of processes of each kind, and their machines.

    A replica is one core with P x T workers (P pipeline stages of T tensor-parallel workers). The workers of a stage
    have consecutive ranks. Ranks count the workers of all replicas, and each of `nnodes` nodes has equally many
    consecutive ones. Cores and frontends are on node 0, which the other nodes reach at `master_addr`. With an external
    launcher, each worker joins separately as its own node.
    """

    tensor_parallel_size: Annotated[
        int, option("Workers that split each layer", "--tp --tp-size -tp", ge=1, le=1024)
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        option(
            "Pipeline stages that the layers are divided into", "--pp --pp-size -pp", ge=1, le=1024
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        option(
            "Place whole experts on workers of all replicas, instead of splitting each",
            "--enable-ep -ep",
        ),
    ] = False
    data_parallel_size: Annotated[
        int,
        option("Model replicas, each with its own KV cache", "--dp --dp-size -dp", ge=1, le=256),
    ] = 1
    replica_roles: Annotated[
        tuple[ReplicaRole, ...],
        option(
            "Replicas per role, such as prefill=1,decode=3; sets --data-parallel-size",
            parse="replica_roles",
            metavar="ROLE=N,…",
        ),
    ] = ()
    remote_prefill_tokens: Annotated[
        int, option("Minimum uncached tokens of prompts that a prefill replica computes", ge=1)
    ] = 256
    api_server_count: Annotated[
        int, option("Frontend processes that share the port", "-asc", ge=1, le=256)
    ] = 1
    nnodes: Annotated[
        int,
        machines(
            "Machines that share the workers equally; each runs engine serve", "-n", ge=1, le=1024
        ),
    ] = 1
    master_addr: Annotated[
        str, machines("Address at which other machines reach node 0", metavar="HOST")
    ] = "127.0.0.1"
    master_port: Annotated[
        int, machines("First port on node 0; two more follow per replica", ge=1, le=65535)
    ] = 29501
    distributed_executor_backend: Annotated[
        ExecutorBackend,
        machines("Launcher of workers: engine serve (mp) or torchrun (external_launcher)"),
    ] = ExecutorBackend.MP
    cluster_key: Annotated[
        str | None,
        machines("Key file from engine keygen, the same on every machine", "--key", parse="file"),
    ] = None

    def role_of(self, core_index: int) -> ReplicaRole:
        """Return the role of a replica."""
        return self.replica_roles[core_index] if self.replica_roles else ReplicaRole.BOTH

    @property
    def is_external(self) -> bool:
        """True if an external launcher starts the workers."""
        return self.distributed_executor_backend is ExecutorBackend.EXTERNAL_LAUNCHER

    @property
    def is_distributed(self) -> bool:
        """True if cores must be reachable from other machines."""
        return self.nnodes > 1 or self.is_external

    @property
    def num_nodes(self) -> int:
        """The number of nodes with workers."""
        return self.num_workers if self.is_external else self.nnodes

    @property
    def num_remote_nodes(self) -> int:
        """The number of nodes that must join."""
        return self.num_nodes - (0 if self.is_external else 1)

    @property
    def workers_per_node(self) -> int:
        """The number of workers on each node."""
        return self.num_workers // self.num_nodes

    @property
    def num_local_workers(self) -> int:
        """The number of workers on node 0, where the cores and frontends run."""
        return 0 if self.is_external else self.workers_per_node

    def node_of(self, worker: int) -> int:
        """Return the node of a worker, which is numbered across all replicas."""
        return worker // self.workers_per_node

    @property
    def divides_experts_among_replicas(self) -> bool:
        """True if the workers of all replicas divide the experts of each layer, which makes them one group."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    def group_of(self, core_index: int) -> int:
        """Return the first core whose workers are in the same group as those of the given core."""
        return 0 if self.divides_experts_among_replicas else core_index

    def spans_nodes(self, core_index: int) -> bool:
        """Return whether the workers of the core's group may be on several machines."""
        if self.divides_experts_among_replicas:
            return self.is_distributed
        first = core_index * self.workers_per_core
        return self.is_external or self.node_of(first) != self.node_of(
            first + self.workers_per_core - 1
        )

    def shares_machine(self, core_index: int) -> bool:
        """Return whether all workers of a core are on its machine."""
        last = (core_index + 1) * self.workers_per_core - 1
        return not self.is_external and self.node_of(last) == 0

    @property
    def node_address(self) -> str:
        """The address at which nodes join (ROUTER).

        The next ports are for the cores; the ports after them are for torch.distributed.
        """
        return self.master_address(0)

    def master_address(self, offset: int) -> str:
        """Return the TCP address of node 0 at `offset` ports after `--master-port`."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port + offset}"

    @property
    def workers_per_core(self) -> int:
        """The number of workers of a replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank of the worker that returns each step's results: the first of the last stage."""
        return self.workers_per_core - self.tensor_parallel_size

    @property
    def num_workers(self) -> int:
        """The number of workers of all replicas."""
        return self.data_parallel_size * self.workers_per_core
