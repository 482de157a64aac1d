"""Where a prompt is computed and where its answer is written: one pure choice from measured rates.

A request is *split* (prefill computes, decode continues) or *local* (one worker does both: a decode
worker that prefills in chunks between its steps, or one of role both). What each would cost is a
sum of seconds, most of them of the time to the first token:

    split   wait     prompt tokens queued at prefill / its rate
            compute  tokens that prefill does not hold / its rate
            overhead what first tokens by this way took lately on top of that (`Overheads`)
            exposed  transfer that no computing hides: the second token is late by it
            crowd    a step of decode's streams
            setup    of a pair that has not connected yet
    local   wait     prompt tokens queued at this worker / its rate
            compute  tokens that it does not hold / its rate
            overhead likewise
            crowd    a step of its streams
            harm     the streams beside it stand still while it computes, each for that long

The least sum wins. Harm counts for no more than a small share of the time to the first token: who
writes an answer is spared a prompt wherever that delays the prompt by no more than this (L14), and
how long a stream stands still at a time is bounded at the worker. Of costs about equal the worker
wins that got less lately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvrelay.services.router.backlog import Waiting
from kvrelay.services.router.overhead import UNMEASURED_S
from kvrelay.services.router.policy import LiveWorker
from kvrelay.shared.intmath import cdiv
from kvrelay.shared.telemetry.labels import RouteKind

HARM_WEIGHT: Final = 0.25
"""A second that a stream stands still against a second more to another's first token."""
HARM_SHARE: Final = 0.05
"""Most that harm counts for, by the time to the first token."""
FEW_TOKENS: Final = 64
"""A worker that was never seen computing a prompt is trusted with so many tokens of one."""
ASSUMED_TOKENS_PER_S: Final = 1000.0
"""Of workers without a measured rate, for comparing them while none of the group has one."""
PAIRED: Final = 8
"""Workers of each role of which all pairs are compared."""
RELAY_TOKENS_PER_S: Final = 50_000.0
"""For finding the decode workers worth comparing; what a pair costs comes from its own rate."""
FULL_S: Final = 1e6
"""Of a decode worker without memory for a prompt: after all others."""
MARGIN_SHARE: Final = 0.05
MARGIN_S: Final = 0.005
"""Costs no farther apart than this are about equal."""

Mode = Literal["auto", "split", "local"]
SetupOf = Callable[[str, str], float]
"""Seconds that a pair of prefill and decode worker, by name, costs before it can relay."""


def no_setup(prefill: str, decode: str) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Site:
    """A worker as the choice sees it."""

    worker: LiveWorker
    held_tokens: int = 0
    """Of the prompt, from its first token on, in whole blocks."""
    waiting: Waiting = field(default_factory=Waiting)
    share: int = 0
    """How much it got lately, for those about equal."""

    @property
    def name(self) -> str:
        return self.worker.incarnation

    @property
    def measured(self) -> bool:
        return self.worker.load.prefill_tokens_per_s > 0

    def lacking(self, prompt_tokens: int) -> int:
        """Tokens it would have to compute: at least the last one."""
        return max(prompt_tokens - self.held_tokens, 1)

    def has_room(self, prompt_tokens: int) -> bool:
        size = self.worker.record.block_size
        new_blocks = cdiv(prompt_tokens + 1, size) - self.held_tokens // size
        return new_blocks <= self.worker.load.free_blocks


@dataclass(frozen=True, slots=True)
class Terms:
    """What a route costs, in seconds."""

    wait_s: float
    compute_s: float
    overhead_s: float = 0.0
    exposed_s: float = 0.0
    crowd_s: float = 0.0
    harm_s: float = 0.0
    setup_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From now to the first token."""
        return self.wait_s + self.compute_s + self.overhead_s

    @property
    def cost_s(self) -> float:
        harm_s = min(self.harm_s * HARM_WEIGHT, self.ttft_s * HARM_SHARE)
        return self.ttft_s + self.exposed_s + self.crowd_s + self.setup_s + harm_s


@dataclass(frozen=True, slots=True)
class Route:
    """Who does what; `decode` None means that `first` does all."""

    first: Site
    decode: Site | None
    terms: Terms
    measured: bool
    """Whether the terms come from measured rates: then they are a prediction."""
    lacks_room: bool = False

    @property
    def workers(self) -> tuple[str, ...]:
        return (self.first.name,) if self.decode is None else (self.first.name, self.decode.name)

    @property
    def kind(self) -> RouteKind:
        return RouteKind.LOCAL if self.decode is None else RouteKind.SPLIT

    @property
    def cost(self) -> tuple[bool, float]:
        """Smaller is better: a worker without memory for it now is the last resort."""
        return self.lacks_room, self.terms.cost_s


@dataclass(frozen=True, slots=True)
class Sites:
    """Who may serve a leg, all of one group (`policy.Candidates`)."""

    prefills: tuple[Site, ...] = ()
    decodes: tuple[Site, ...] = ()
    alone: tuple[Site, ...] = ()
    overhead_s: Mapping[RouteKind, float] = field(default_factory=lambda: UNMEASURED_S)
    setup_s: SetupOf = no_setup

    @property
    def locals(self) -> tuple[Site, ...]:
        """Who can do all of it; a decode worker is among `alone` when no prefill worker is left."""
        return tuple({site.name: site for site in (*self.decodes, *self.alone)}.values())


def choose(prompt_tokens: int, sites: Sites, mode: Mode = "auto") -> Route:
    """The best route. `prompt_tokens`: all whose KV is needed, tokens already answered included.

    Raises `ValueError` when no worker can serve.
    """
    return best(routes(prompt_tokens, sites, mode))


def best(options: Sequence[Route]) -> Route:
    """The cheapest; of those about equal the one whose workers got less lately."""
    if not options:
        raise ValueError("no worker can serve the request")
    return min(near(options), key=_preference)


def near(options: Sequence[Route]) -> list[Route]:
    """Those that cost no more than the cheapest, or about that. A way around is not about equal:
    split and local compare by cost alone."""
    cheapest = min(options, key=lambda route: (*route.cost, _preference(route)))
    lacks_room, cost_s = cheapest.cost
    limit_s = max(cost_s * (1 + MARGIN_SHARE), cost_s + MARGIN_S)
    return [
        route
        for route in options
        if route.kind is cheapest.kind
        and route.lacks_room == lacks_room
        and route.terms.cost_s <= limit_s
    ]


def _preference(route: Route) -> tuple[int, float, str, str]:
    share = route.first.share + (route.decode.share if route.decode else 0)
    return share, route.terms.cost_s, route.first.name, route.decode.name if route.decode else ""


def routes(prompt_tokens: int, sites: Sites, mode: Mode = "auto") -> list[Route]:
    """The ways to serve it that `mode` allows, and what they cost; never none if there is one.

    Of many workers only the most promising ones are paired.
    """
    rates = _Rates.of((*sites.prefills, *sites.locals))

    def done_s(prefill: Site) -> float:
        return rates.seconds(prefill, prefill.waiting.tokens + prefill.lacking(prompt_tokens))

    def ready_s(decode: Site) -> float:
        late_s = 0.0 if decode.has_room(prompt_tokens) else FULL_S
        return late_s + _step_s(decode) + decode.lacking(prompt_tokens) / RELAY_TOKENS_PER_S

    pairs = [
        _split(prompt_tokens, prefill, decode, rates, sites)
        for prefill in _promising(sites.prefills, done_s)
        for decode in _promising(sites.decodes, ready_s)
    ]
    whole = [
        _local(prompt_tokens, site, rates, sites.overhead_s[RouteKind.LOCAL])
        for site in sites.locals
    ]
    if mode == "local" or not pairs:
        return whole or pairs
    if mode == "split":
        return pairs
    return pairs + [r for r in whole if _trusted(r, prompt_tokens, sites)]


def _promising(sites: Sequence[Site], seconds: Callable[[Site], float]) -> Sequence[Site]:
    """At most `PAIRED` of them: those with the fewest `seconds`, of about equals who got less."""
    if len(sites) <= PAIRED:
        return sites
    return sorted(sites, key=lambda site: (seconds(site) // MARGIN_S, site.share, site.name))[
        :PAIRED
    ]


def _trusted(route: Route, prompt_tokens: int, sites: Sites) -> bool:
    """A guess never moves a prompt to where streams run, unless most of it is there already; a few
    tokens do no harm, and measure."""
    lacking = route.first.lacking(prompt_tokens)
    if lacking <= FEW_TOKENS or (route.measured and all(site.measured for site in sites.prefills)):
        return True
    return 2 * lacking <= min(site.lacking(prompt_tokens) for site in sites.prefills)


@dataclass(frozen=True, slots=True)
class _Rates:
    """Prompt tokens per second of each worker; unmeasured it counts as the group's slowest."""

    by_name: Mapping[str, float]

    @staticmethod
    def of(sites: Iterable[Site]) -> _Rates:
        rates = {site.name: site.worker.load.prefill_tokens_per_s for site in sites}
        known = [rate for rate in rates.values() if rate > 0]
        assumed = min(known, default=ASSUMED_TOKENS_PER_S)
        return _Rates({name: rate or assumed for name, rate in rates.items()})

    def seconds(self, site: Site, tokens: int) -> float:
        return tokens / self.by_name[site.name]


def _split(prompt_tokens: int, prefill: Site, decode: Site, rates: _Rates, sites: Sites) -> Route:
    compute_s = rates.seconds(prefill, prefill.lacking(prompt_tokens))
    relay_tokens_per_s = prefill.worker.load.relay_tokens_per_s
    relay_s = 0.0
    if relay_tokens_per_s > 0:
        relay_s = decode.lacking(prompt_tokens) / relay_tokens_per_s
    terms = Terms(
        wait_s=rates.seconds(prefill, prefill.waiting.tokens),
        compute_s=compute_s,
        overhead_s=sites.overhead_s[RouteKind.SPLIT],
        exposed_s=max(relay_s - compute_s, 0.0),
        crowd_s=_step_s(decode),
        setup_s=sites.setup_s(prefill.name, decode.name),
    )
    # Prefill's memory gets free as its queue moves on: `wait_s` knows that already.
    return Route(prefill, decode, terms, prefill.measured, not decode.has_room(prompt_tokens))


def _local(prompt_tokens: int, site: Site, rates: _Rates, overhead_s: float) -> Route:
    compute_s = rates.seconds(site, site.lacking(prompt_tokens))
    terms = Terms(
        wait_s=rates.seconds(site, site.waiting.tokens),
        compute_s=compute_s,
        overhead_s=overhead_s,
        crowd_s=_step_s(site),
        harm_s=compute_s * site.waiting.legs,
    )
    return Route(site, None, terms, site.measured, not site.has_room(prompt_tokens))


def _step_s(site: Site) -> float:
    """About how long a step of the worker's streams takes; 0 until measured."""
    rate = site.worker.load.decode_tokens_per_s
    return site.waiting.legs / rate if rate > 0 else 0.0
