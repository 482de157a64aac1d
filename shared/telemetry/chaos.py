"""The one metric of chaos: a part that was not asked for it does not have it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from kvrelay.shared.chaos.plan import Fault, Step


def count_chaos(registry: CollectorRegistry) -> Callable[[Step, Fault], None]:
    """Adds `kvrelay_chaos_injected_total` to a registry; gives what counts a fault in it."""
    counter = Counter(
        "kvrelay_chaos_injected",
        "Faults injected on purpose.",
        ["step", "fault"],
        registry=registry,
    )

    def injected(step: Step, fault: Fault) -> None:
        counter.labels(step, fault).inc()

    return injected
