"""Random lives of an engine for as long as wanted: `python tests/fuzz.py --events 1000000`.

The same world and checks as in `tests/unit/test_engine_machine.py`. A life is known by its number:
`--first N --events 1` lives only that one, and stops where it broke.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.sim.engine_world import World

LIFE_EVENTS = 400


def fuzz(first: int, events: int) -> Counter[str]:
    """Whole lives from number `first` on, until there were `events`; how often what happened."""
    happened: Counter[str] = Counter()
    number = first
    while happened.total() < events:
        world = World(random.Random(number))
        try:
            for _ in range(LIFE_EVENTS):
                world.act()
            world.settle()
        except BaseException:
            sys.stderr.write(f"life {number} broke after {world.happened.total()} events\n")
            raise
        happened += world.happened
        number += 1
    return happened


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    counts = fuzz(args.first, args.events)
    for what, count in counts.most_common():
        sys.stdout.write(f"{count:9,d} {what}\n")
    sys.stdout.write(f"{counts.total():9,d} events, none broke anything\n")
