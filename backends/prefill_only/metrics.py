"""The engine's Prometheus series. Times are in seconds, sizes in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kernels.dispatch import compilation_counts, fallback_counts

__all__ = ["EngineMetrics", "KernelCollector", "SchedulerCollector"]

_FAST = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2)


class EngineMetrics:
    """Counters that the engine writes. Kept apart from the process-wide registry: the gateway collects them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = Counter("onepass_passes", "Passes finished", registry=self.registry)
        self.computed_tokens = Counter("onepass_computed_tokens", "Prompt tokens computed", registry=self.registry)
        self.shared_tokens = Counter(
            "onepass_shared_tokens", "Prompt tokens computed once for several jobs", registry=self.registry
        )
        self.cached_tokens = Counter(
            "onepass_cached_tokens", "Prompt tokens read from the prefix cache", registry=self.registry
        )
        self.cancelled = Counter(
            "onepass_cancelled", "Jobs dropped because nobody waits for them", registry=self.registry
        )
        self.parked = Counter(
            "onepass_passes_parked", "Times a pass was left for a shorter one", registry=self.registry
        )
        self.out_of_memory = Counter(
            "onepass_out_of_memory", "Passes that did not fit in memory", registry=self.registry
        )
        self.step_seconds = Histogram(
            "onepass_step_seconds",
            "One step of a pass: what a newcomer waits at most",
            buckets=_FAST,
            registry=self.registry,
        )
        self.pass_seconds = Histogram(
            "onepass_pass_seconds", "Computing one pass", buckets=(*_FAST, 4, 8, 16), registry=self.registry
        )
        self.company = Gauge(
            "onepass_rows_independent_of_company",
            "1 where the check at start found rows bitwise independent of what they are packed with",
            ["part"],
            registry=self.registry,
        )
        self.build = Info("onepass_engine", "What computes", registry=self.registry)

    def collectors(self) -> list[Collector]:
        return [_Forward(self.registry), KernelCollector()]


class _Forward(Collector):
    """Shows one registry's series in another."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        return self._source.collect()

    def describe(self) -> Iterable[Metric]:
        return []


class SchedulerCollector(Collector):
    """Gauges read off the scheduler when somebody scrapes."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"onepass_{name}", name.replace("_", " "), value=value)

    def describe(self) -> Iterable[Metric]:
        return []


class KernelCollector(Collector):
    """What the kernels package counts in this process: 0 on a CPU, and on a GPU whenever all is as it should be."""

    def collect(self) -> Iterable[Metric]:
        compiled = CounterMetricFamily(
            "onepass_compilations_after_ready", "GPU kernels compiled on live requests", labels=["kernel"]
        )
        for kernel, count in compilation_counts.copy().items():
            compiled.add_metric([kernel], count)
        fallbacks = CounterMetricFamily(
            "onepass_kernel_fallbacks", "Calls that took torch's op in place of a GPU kernel", labels=["op", "reason"]
        )
        for labels, count in fallback_counts.copy().items():
            fallbacks.add_metric(labels, count)
        return [compiled, fallbacks]

    def describe(self) -> Iterable[Metric]:
        return []
