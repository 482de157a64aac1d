"""How metrics are made: each series exists from the start, and gauges are read at each scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

VLLM: Final = "vllm:"


def counter(registry: CollectorRegistry, name: str, text: str, **labels: type[StrEnum]) -> Counter:
    """A counter whose every series exists from the start, at 0."""
    made = Counter(f"kvrelay_{name}", text, list(labels), registry=registry)
    for values in product(*labels.values()):
        made.labels(*values)
    return made


def histogram(
    registry: CollectorRegistry,
    name: str,
    text: str,
    buckets: tuple[float, ...],
    **labels: type[StrEnum],
) -> Histogram:
    """Likewise."""
    made = Histogram(f"kvrelay_{name}", text, list(labels), registry=registry, buckets=buckets)
    for values in product(*labels.values()) if labels else ():
        made.labels(*values)
    return made


class Living(Collector):
    """Families that are made anew at each scrape."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read a state that may not exist yet."""
        return []


class TokenHistogram(Collector):
    """A histogram for what happens with every token: one thread may observe, at a tenth of what
    one that any thread may use costs."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]
    ) -> None:
        self._name, self._text, self._bounds = f"kvrelay_{name}", text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        total, buckets = 0, []
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for bound, count in zip(bounds, [*self._counts], strict=True):
            total += count
            buckets.append((bound, float(total)))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


@dataclass(frozen=True, slots=True)
class Alias:
    """The same numbers under the name that vLLM has for them."""

    name: str
    """Without `vllm:`, and without the `_total` of counters."""
    source: Collector
    where: Mapping[str, str] = field(default_factory=dict)
    """Only the series with these labels; the labels are left out. Of several the sum is told."""
    without: tuple[str, ...] = ()
    """Labels over which is summed."""
    text: str = ""
    """What it says, if that is not what the source says."""


class VllmNames(Collector):
    """Dashboards and autoscalers made for vLLM find what they ask for. Costs nothing but at a
    scrape: nothing is counted twice."""

    def __init__(self, model: str, aliases: tuple[Alias, ...]) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._aliases = aliases

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for alias in self._aliases:
            for family in alias.source.collect():
                yield self._renamed(alias, family)

    def _renamed(self, alias: Alias, family: Metric) -> Metric:
        name = VLLM + alias.name
        renamed = Metric(name, alias.text or family.documentation, family.type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix == "_created" or not alias.where.items() <= sample.labels.items():
                continue
            kept = {k: v for k, v in sample.labels.items() if k not in alias.where}
            kept = {k: v for k, v in kept.items() if k not in alias.without}
            key = (name + suffix, tuple(kept.items()))
            sums[key] = sums.get(key, 0.0) + sample.value
        for (sample_name, labels), value in sums.items():
            renamed.add_sample(sample_name, {**self._labels, **dict(labels)}, value)
        return renamed
