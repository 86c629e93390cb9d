"""Metrics as objects, in the form in which vLLM's `LLM.get_metrics` returns them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import Metric as Family
from prometheus_client.samples import Sample


@dataclass
class Metric:
    """A metric of one replica.

    Attributes:
        name: Its name, without `_total`.
        labels: Its labels, such as `model_name` and `engine`, the number of the replica.
    """

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int | float


@dataclass
class Vector(Metric):
    """A counter for each position, such as that of a token in its draft."""

    values: list[int | float]


@dataclass
class Gauge(Metric):
    """A number that grows and shrinks."""

    value: float


@dataclass
class Histogram(Metric):
    """Observed values.

    Attributes:
        count: Their number.
        sum: Their sum.
        buckets: Upper bound -> the number of values up to it. The last bound is `+Inf`.
    """

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def read_families(families: Iterable[Family]) -> list[Metric]:
    """Return the metrics of Prometheus' families."""
    return [metric for family in families for metric in _read_family(family)]


def _read_family(family: Family) -> Iterator[Metric]:
    name = family.name
    if family.type == "histogram":
        yield from _read_histograms(family)
    elif name.endswith("_per_pos"):
        for labels, samples in _group(family.samples, "position"):
            samples.sort(key=lambda sample: int(sample.labels["position"]))
            yield Vector(name, labels, [_number(sample) for sample in samples])
    elif family.type == "counter":
        for sample in family.samples:
            yield Counter(name, sample.labels, _number(sample))
    else:
        for sample in family.samples:
            yield Gauge(name, sample.labels, sample.value)


def _read_histograms(family: Family) -> Iterator[Histogram]:
    for labels, samples in _group(family.samples, "le"):
        histogram = Histogram(family.name, labels)
        for sample in samples:
            if sample.name.endswith("_bucket"):
                histogram.buckets[sample.labels["le"]] = int(sample.value)
            elif sample.name.endswith("_sum"):
                histogram.sum = sample.value
            elif sample.name.endswith("_count"):
                histogram.count = int(sample.value)
        yield histogram


def _group(samples: Iterable[Sample], label: str) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """Yield the labels other than `label`, and the samples that share them."""
    groups: defaultdict[tuple[tuple[str, str], ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        others = tuple(each for each in sample.labels.items() if each[0] != label)
        groups[others].append(sample)
    for others, shared in groups.items():
        yield dict(others), shared


def _number(sample: Sample) -> int | float:
    value = float(sample.value)
    return int(value) if value.is_integer() else value
