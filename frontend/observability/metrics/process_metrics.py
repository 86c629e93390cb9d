"""Metrics about processes. The supervisor counts them, and every frontend reports the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily

from ....protocol.supervisor_messages import ProcessInfo


def restart_family(model_name: str, processes: Iterable[ProcessInfo]) -> CounterMetricFamily:
    """Return how often processes were restarted, by kind and replica."""
    family = CounterMetricFamily(
        "engine:process_restarts",
        "Restarts of processes after a crash, a hang or a command, by kind of process.",
        labels=["model_name", "engine", "process"],
    )
    counts: Counter[tuple[str, str]] = Counter()
    for process in processes:
        kind = process.name.rstrip("0123456789").rstrip()
        replica = "" if process.replica is None else str(process.replica)
        counts[replica, kind] += process.num_restarts
    for (replica, kind), count in counts.items():
        family.add_metric([model_name, replica, kind], count)
    return family
