"""One system under measurement, as a process: a request and an answer are a line of JSON each.

    python serve.py DRIVER.py SETTINGS

It runs in the system's own environment, so this file and the peers' drivers import nothing of
kvrelay. All systems are measured here, by one clock and one rule: a driver computes steps and says
which requests got a token in each.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

SPARE_OUTPUTS = 64
"""A request asks for so many tokens more than are measured, so that none ends inside the window:
the first prompts of a large batch decode while the last are still read."""


class System(Protocol):
    """An engine that was loaded, idle between measurements."""

    about: dict[str, Any]
    """Name, version and how it is set up, for the report."""

    def begin(self, prompts: list[list[int]], outputs: int) -> None:
        """Take new requests, each for `outputs` greedy tokens whatever they are."""
        ...

    def advance(self) -> list[int]:
        """Compute one step as the engine schedules it; which requests, by index, got a token."""
        ...

    def drop(self) -> None:
        """Forget all requests, ended or not; nothing of them is found again."""
        ...

    def phases_s(self) -> dict[str, float]:
        """Seconds spent since the start by kind of work; {} where it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """`tokens` were computed in `seconds`: prompt tokens when `steps` was 0, else output tokens."""

    tokens: int
    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""
    steps: int
    phases_s: dict[str, float]


def measure(system: System, prompts: list[list[int]], steps: int) -> Reading:
    """With `steps` 0: from the arrival of the prompts until each has its first token. Else: so many
    steps from then on, each of which gives every request a token."""
    watch = Watch(system)
    system.begin(prompts, steps + SPARE_OUTPUTS if steps else 1)
    waiting = set(range(len(prompts)))
    turns = 0
    while waiting:
        waiting.difference_update(system.advance())
        turns += 1
    reading = watch.reading(sum(map(len, prompts)), turns)
    if steps:
        watch = Watch(system)
        tokens = turns = 0
        while tokens < steps * len(prompts):
            tokens += len(system.advance())
            turns += 1
        reading = watch.reading(tokens, turns)
    system.drop()
    return reading


class Watch:
    """Time and work since it was made."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._phases_s = system.phases_s()
        self._cpu_s = time.process_time()
        self._begun_s = time.perf_counter()

    def reading(self, tokens: int, steps: int) -> Reading:
        seconds = time.perf_counter() - self._begun_s
        cpu_seconds = time.process_time() - self._cpu_s
        phases_s = {n: s - self._phases_s[n] for n, s in self._system.phases_s().items()}
        return Reading(tokens, seconds, cpu_seconds, steps, phases_s)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print belongs into the log
    system = runpy.run_path(sys.argv[1])["open_system"](json.loads(sys.argv[2]))
    answers.write(json.dumps(system.about) + "\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        call, given = request["call"], request["with"]
        if call == "measure":
            answer = asdict(measure(system, **given))
        else:  # what only one driver can do
            answer = getattr(system, call)(**given)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
