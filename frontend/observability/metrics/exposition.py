"""The Prometheus metrics of a scrape, from what all frontends have counted.

They are rendered under `engine:` and, if enabled, under vLLM's names, which have the same meaning and buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ....protocol.config import EngineConfig
from ....protocol.kv_transfer.multi import find_connector
from ....protocol.kv_transfer.store import DISK_CONNECTOR, LMCACHE_CONNECTOR
from ....protocol.messages import SchedulerStats
from ....protocol.supervisor_messages import EngineStatus
from .core_metrics import CoreMetrics, Counts
from .info_metrics import cache_family, lora_family
from .names import (
    COUNTERS,
    DISK_COUNTERS,
    GAUGES,
    HISTOGRAMS,
    OLD_GAUGES,
    OLD_HISTOGRAMS,
    OWN_COUNTERS,
    OWN_GAUGES,
    OWN_HISTOGRAMS,
    TRANSFER_COUNTERS,
    VLLM_COUNTERS,
    VLLM_HOST_COUNTERS,
    WAITING_REASONS,
    CounterValue,
)
from .peer_names import PEERS, PeerNames
from .process_metrics import restart_family
from .store_metrics import store_families

ScalarFamily = GaugeMetricFamily | CounterMetricFamily
Family = ScalarFamily | HistogramMetricFamily


class Exposition(Collector):
    """Renders the metrics for a scrape.

    Args:
        config: The configuration of the engine.
        count: Returns the current counts of all frontends.
        also: Names of other servers whose names of metrics are used, too, besides those of the configuration.
    """

    def __init__(
        self, config: EngineConfig, count: Callable[[], Counts], also: tuple[str, ...] = ()
    ) -> None:
        self._config, self._count = config, count
        self._compat = tuple(dict.fromkeys((*config.frontend.metrics_compat, *also)))
        self._has_store = any(
            find_connector(config.kv_transfer, name) for name in (DISK_CONNECTOR, LMCACHE_CONNECTOR)
        )
        self._model_name = config.model.served_names[0]
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if config.parallel.api_server_count == 1:
            # A scrape reaches an arbitrary frontend, and metrics of processes cannot be summed over the frontends.
            ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the body and content type of a scrape in the format preferred by the Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Iterator[Family]:
        """Yield nothing, because the families depend on the configuration."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Yield all metric families, summed over the frontends."""
        counts = self._count()
        cores = counts.cores
        own_counters = {**COUNTERS, **OWN_COUNTERS}
        if self._has_store:
            own_counters |= DISK_COUNTERS
        if self._config.kv_transfer is not None:
            own_counters |= TRANSFER_COUNTERS
        yield from self._families("engine", cores, {**GAUGES, **OWN_GAUGES}, _counted(own_counters))
        yield from self._histograms("engine", cores, {name: name for name in OWN_HISTOGRAMS})
        if self._config.model.enable_lora:
            yield self._family_by(
                CounterMetricFamily,
                "engine:lora_requests",
                "Sequences that ended, by LoRA adapter.",
                "lora_name",
                [core.num_finished_by_lora for core in cores],
            )
        yield self._dropped_frames(cores, counts.status)
        yield self._replicas_up(counts.are_up)
        yield restart_family(self._model_name, counts.status.processes)
        yield from store_families(self._model_name, counts.store)
        if "vllm" in self._compat:
            counters = _counted(COUNTERS) | VLLM_COUNTERS
            if self._config.cache.host_gib or self._has_store:
                counters |= VLLM_HOST_COUNTERS
            yield from self._families("vllm", cores, GAUGES | OLD_GAUGES, counters)
            yield from self._histograms("vllm", cores, OLD_HISTOGRAMS)
        for name in self._compat:
            if name in PEERS:
                yield from self._peer_families(PEERS[name], cores)

    def _families(
        self,
        prefix: str,
        cores: list[CoreMetrics],
        gauges: dict[str, tuple[str, Callable[[SchedulerStats], float]]],
        counters: dict[str, tuple[str, CounterValue]],
    ) -> Iterator[Family]:
        for name, (documentation, value_of) in gauges.items():
            values = [value_of(core.stats) for core in cores]
            yield self._family(GaugeMetricFamily, f"{prefix}:{name}", documentation, values)
        yield self._family_by(
            GaugeMetricFamily,
            f"{prefix}:num_requests_waiting_by_reason",
            "Waiting sequences: for capacity, or deferred until a grammar is compiled or blocks are loaded.",
            "reason",
            [{why: count(core.stats) for why, count in WAITING_REASONS.items()} for core in cores],
        )
        for name, (documentation, count_of) in counters.items():
            counts = [count_of(core.counters) for core in cores]
            yield self._family(CounterMetricFamily, f"{prefix}:{name}", documentation, counts)
        yield self._family_by(
            CounterMetricFamily,
            f"{prefix}:request_success",
            "Sequences that ended, by reason.",
            "finished_reason",
            [{str(why): count for why, count in core.num_finished.items()} for core in cores],
        )
        yield self._family_by(
            CounterMetricFamily,
            f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that became output, by their position in the draft.",
            "position",
            [
                {str(position): n for position, n in enumerate(core.num_accepted_per_pos)}
                for core in cores
            ],
        )
        yield self._family_by(
            CounterMetricFamily,
            f"{prefix}:admission_rejections",
            "Requests that a core refused to queue, by reason.",
            "reason",
            [core.num_rejected for core in cores],
        )
        yield from self._histograms(prefix, cores, {name: name for name in HISTOGRAMS})
        yield cache_family(prefix, self._config, cores)
        if self._config.model.enable_lora:
            yield lora_family(prefix, self._config, cores)

    def _peer_families(self, names: PeerNames, cores: list[CoreMetrics]) -> Iterator[Family]:
        for kind, families in (
            (GaugeMetricFamily, names.gauges),
            (CounterMetricFamily, names.counters),
        ):
            for name, (documentation, value_of) in families.items():
                yield self._family(
                    kind, f"{names.prefix}:{name}", documentation, map(value_of, cores)
                )
        yield from self._histograms(names.prefix, cores, names.histograms)

    def _family(
        self, kind: type[ScalarFamily], name: str, documentation: str, values: Iterable[float]
    ) -> ScalarFamily:
        """Return a family with one sample per replica."""
        family = kind(name, documentation, labels=["model_name", "engine"])
        for index, value in enumerate(values):
            family.add_metric([self._model_name, str(index)], value)
        return family

    def _family_by(
        self,
        kind: type[ScalarFamily],
        name: str,
        documentation: str,
        label: str,
        values: Iterable[Mapping[str, float]],
    ) -> ScalarFamily:
        """Return a family with one sample per replica and value of `label`."""
        family = kind(name, documentation, labels=["model_name", "engine", label])
        for index, by_label in enumerate(values):
            for label_value, value in by_label.items():
                family.add_metric([self._model_name, str(index), label_value], value)
        return family

    def _histograms(
        self, prefix: str, cores: list[CoreMetrics], names: Mapping[str, str]
    ) -> Iterator[Family]:
        """Yield histograms under other names; `names` maps the current names to them."""
        for name, source in names.items():
            family = HistogramMetricFamily(
                f"{prefix}:{name}",
                (HISTOGRAMS | OWN_HISTOGRAMS)[source][0],
                labels=["model_name", "engine"],
            )
            for index, core in enumerate(cores):
                histogram = core.histograms[source]
                family.add_metric(
                    [self._model_name, str(index)], histogram.cumulative_buckets(), histogram.sum
                )
            yield family

    def _dropped_frames(self, cores: list[CoreMetrics], status: EngineStatus) -> Family:
        family = self._family_by(
            CounterMetricFamily,
            "engine:dropped_frames",
            "Invalid or duplicate messages, by the process that dropped them.",
            "process",
            [
                {"core": core.num_frames_dropped_there, "frontend": core.num_frames_dropped_here}
                for core in cores
            ],
        )
        num_dropped: Counter[int | None] = Counter()
        num_dropped_by_store = 0
        for process in status.processes:
            if process.name == "store":
                num_dropped_by_store = process.num_dropped_frames
            else:
                num_dropped[process.replica] += process.num_dropped_frames
        for index in range(len(cores)):
            family.add_metric([self._model_name, str(index), "worker"], num_dropped[index])
        # Messages between the supervisor and the frontends belong to no replica. Every frontend reports the same count.
        family.add_metric([self._model_name, "", "frontend"], num_dropped[None])
        family.add_metric([self._model_name, "", "store"], num_dropped_by_store)
        family.add_metric([self._model_name, "", "supervisor"], status.num_dropped_frames)
        return family

    def _replicas_up(self, are_up: list[bool]) -> Family:
        return self._family(
            GaugeMetricFamily,
            "engine:replica_up",
            "1 while the replica's core and workers are ready, else 0.",
            are_up,
        )


def _counted(documentation: dict[str, str]) -> dict[str, tuple[str, CounterValue]]:
    return {name: (text, itemgetter(name)) for name, text in documentation.items()}
