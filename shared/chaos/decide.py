"""Which message meets which fault: a pure function of (seed, part, rule, step, counter).

Nothing is drawn from a stream of random numbers, so one rule's faults do not move another's, and a
part that is started again decides as it did in its first life.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.shared.chaos.plan import PROCESS_FAULTS, ChaosPlan, Fault, Rule, Step, load_plan
from kvrelay.shared.types import Role

log = logging.getLogger(__name__)

_UNIT = 2.0**-64


def fraction(*key: object) -> float:
    """In [0, 1), from the key alone."""
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") * _UNIT


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that happens to one message."""

    fault: Fault
    place: float
    """In [0, 1): where it is cut or flipped."""
    delay_s: float


Injected = Callable[[Step, Fault], None]


def strike(fault: Fault, seconds: float) -> None:
    """Do to this process what the plan says."""
    pid = os.getpid()
    if fault is Fault.STOP:
        # Somebody else must wake us.
        subprocess.Popen(["sh", "-c", f"sleep {seconds:g}; kill -CONT {pid}"])
    number = {Fault.KILL: signal.SIGKILL, Fault.TERM: signal.SIGTERM, Fault.STOP: signal.SIGSTOP}
    os.kill(pid, number[fault])


@dataclass(slots=True)
class Chaos:
    """The plan as one part lives it: counts the steps and says what happens at each."""

    plan: ChaosPlan
    part: str
    role: Role | str
    injected: Injected = lambda step, fault: None
    """Told of each fault."""
    strike: Callable[[Fault, float], None] = strike
    _rules: dict[Step, list[tuple[int, Rule]]] = field(default_factory=dict)
    _steps: Counter[Step] = field(default_factory=Counter)
    _done: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for number, rule in self.plan.rules_at(self.part, self.role):
            self._rules.setdefault(rule.step, []).append((number, rule))

    def at(self, step: Step) -> Hit | None:
        """The fault of the next message of this step; the first rule that applies wins."""
        rules = self._rules.get(step)
        if rules is None:
            return None
        self._steps[step] += 1
        count = self._steps[step]
        for number, rule in rules:
            if self._done[number] != rule.limit and self._applies(number, rule, count):
                self._done[number] += 1
                self.injected(step, rule.fault)
                if rule.fault in PROCESS_FAULTS:
                    log.warning("chaos: %s at %s number %d", rule.fault, step, count)
                    self.strike(rule.fault, rule.delay_s)
                    return None
                return self._hit(number, rule, count)
        return None

    def _applies(self, number: int, rule: Rule, count: int) -> bool:
        if rule.nth is not None:
            return count % rule.nth == 0
        assert rule.rate is not None
        return fraction(self.plan.seed, self.part, number, rule.step, count) < rule.rate

    def _hit(self, number: int, rule: Rule, count: int) -> Hit:
        key = (self.plan.seed, self.part, number, rule.step, count)
        delay_s = rule.delay_s
        if rule.fault is Fault.DELAY:
            delay_s *= fraction(*key, "delay")
        return Hit(rule.fault, fraction(*key, "place"), delay_s)


def open_chaos(path: str, part: str, role: Role | str) -> Chaos | None:
    """What the setting asks for: nothing when it is empty. Raises `ConfigError`."""
    if not path:
        return None
    plan = load_plan(Path(path))
    log.warning(
        "CHAOS: this %s injects faults on purpose, as %s says (%d rules, seed %d): never serve "
        "people with it",
        role, path, len(plan.rules), plan.seed,
    )  # fmt: skip
    return Chaos(plan, part, role)
