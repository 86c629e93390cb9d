"""Metrics of the store. Every frontend reports the same values."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ....protocol.store.messages import StoreState


def store_families(
    model_name: str, state: StoreState
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Yield the metrics of a store's state."""
    names = ["model_name"]
    labels = [model_name]
    durable = GaugeMetricFamily(
        "engine:store_durable",
        "1 while all stored data is safe in the file of --store, else 0.",
        labels=names,
    )
    durable.add_metric(labels, float(state.has_file and not state.trouble))
    yield durable
    size = GaugeMetricFamily(
        "engine:store_bytes", "Size of the stored objects, requests and tokens.", labels=names
    )
    size.add_metric(labels, state.num_bytes)
    yield size
    objects = GaugeMetricFamily(
        "engine:store_objects",
        "Objects in the store, such as files, batches and stored responses.",
        labels=names,
    )
    objects.add_metric(labels, state.num_objects)
    yield objects
    requests = GaugeMetricFamily(
        "engine:store_requests",
        "Recorded requests: finished, running, or waiting for a frontend that continues them.",
        labels=[*names, "state"],
    )
    requests.add_metric([*labels, "finished"], state.num_requests)
    requests.add_metric([*labels, "running"], state.num_unfinished - state.num_orphans)
    requests.add_metric([*labels, "waiting"], state.num_orphans)
    yield requests
    evicted = CounterMetricFamily(
        "engine:store_evictions",
        "Objects and finished requests that were deleted for their age or for lack of room.",
        labels=names,
    )
    evicted.add_metric(labels, state.num_evicted)
    yield evicted
