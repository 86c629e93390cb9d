"""Create the queue and the tenant limits that the configuration selects."""

from __future__ import annotations

from ....protocol.config import SchedulerConfig, SchedulingPolicy
from ...state.running_requests import RunningRequests
from .backlog import TenantLimits
from .fair_queue import FairQueue
from .request_queue import DeadlineQueue, FCFSQueue, PriorityQueue, RequestQueue


def make_tenant_limits(config: SchedulerConfig) -> TenantLimits | None:
    """Return the limits per tenant, or None if none is configured."""
    limits = config.max_num_seqs_per_tenant, config.max_num_queued_reqs_per_tenant
    return TenantLimits(*limits) if any(limits) else None


def make_queue(config: SchedulerConfig, running: RunningRequests) -> RequestQueue:
    """Return the queue of the configured policy."""
    match config.policy:
        case SchedulingPolicy.FCFS:
            return FCFSQueue(running)
        case SchedulingPolicy.PRIORITY:
            return PriorityQueue(running, preempts=config.priority_preemption)
        case SchedulingPolicy.DEADLINE:
            return DeadlineQueue(running)
        case SchedulingPolicy.FAIR:
            return FairQueue(
                running, max_num_seqs=config.max_num_seqs, weights=config.tenant_weights
            )
