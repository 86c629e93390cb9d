"""Recount blocks, references, slots and requests, to detect bookkeeping errors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np

from ..kv_cache.manager import KVCacheManager
from ..state.request import Request, RequestKey, RequestStatus
from ..state.running_requests import RunningRequests
from .features.encoder_inputs import EncoderInputs
from .lifecycle import RequestLifecycle
from .queues.backlog import TenantLimits
from .queues.request_queue import RequestQueue


def check_invariants(lifecycle: RequestLifecycle) -> list[str]:
    """Return a description of each count that is wrong; empty if all agree. Takes about 50 ns per block and request."""
    requests, running, loras = lifecycle.requests, lifecycle.running, lifecycle.loras
    return [
        f"{name}: {counted} counted, {expected} expected"
        for name, counted, expected in (
            *_block_sums(lifecycle.manager),
            *_request_sums(requests, running, lifecycle.queue),
            *_encoder_sums(lifecycle.encoders, running),
            ("tenants", *_count_tenants(requests, lifecycle.tenants)),
            ("LoRA adapters", loras.num_held, loras.capacity),
            ("running LoRA adapters", sum(map(loras.is_loaded, running.loras)), len(running.loras)),
        )
        if counted != expected
    ]


def _block_sums(manager: KVCacheManager) -> list[tuple[str, int, int]]:
    pool = manager.pool
    tables = chain(*manager.blocks, *manager.reserved.values())
    held = np.fromiter(filter(None, chain.from_iterable(tables)), np.int64)
    ref_counts = np.array(pool.ref_counts)
    num_wrong = np.count_nonzero(np.bincount(held, minlength=pool.num_blocks) != ref_counts)
    num_held = np.count_nonzero(ref_counts)
    host_sums = []
    if (host := manager.cpu_offload) is not None:
        host_sums = [("CPU blocks", host.num_free + host.num_cached, host.num_blocks)]
    return [
        *host_sums,
        ("blocks with a wrong reference count", int(num_wrong), 0),
        ("free and held blocks", pool.num_free + int(num_held), pool.num_blocks - 1),
        ("references to the null block", pool.ref_counts[0], 0),
        ("cached blocks", pool.count_cached(), pool.num_cached + pool.num_copies),
    ]


def _request_sums(
    requests: Mapping[RequestKey, Request], running: RunningRequests, queue: RequestQueue
) -> list[tuple[str, int, int]]:
    statuses = [request.status for request in requests.values()]
    num_waiting = statuses.count(RequestStatus.WAITING) + statuses.count(RequestStatus.PREEMPTED)
    in_slots = [request for request in running.slots.requests if request is not None]
    num_known = sum(requests.get(request.key) is request for request in in_slots)
    return [
        ("requests in the queue", len(queue), num_waiting),
        ("requests in slots", len(in_slots), len(running)),
        ("live requests in slots", num_known, statuses.count(RequestStatus.RUNNING)),
        ("slots in order", len(running.order), len(running)),
    ]


def _encoder_sums(encoders: EncoderInputs, running: RunningRequests) -> list[tuple[str, int, int]]:
    held = encoders.held_by_request()
    hashes = {content_hash for each in held.values() for content_hash in each}
    num_in_slots = sum(running.slots.requests[request.slot] is request for request in held)
    return [
        ("referenced encoder outputs", encoders.cache.num_referenced, len(hashes)),
        ("requests in slots that hold encoder outputs", num_in_slots, len(held)),
    ]


def _count_tenants(
    requests: Mapping[RequestKey, Request], tenants: TenantLimits | None
) -> tuple[int, int]:
    if tenants is None:
        return 0, 0
    return tenants.num_tenants, len({request.tenant for request in requests.values()})
