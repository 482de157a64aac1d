"""A life of the fuzzer as a record: `python -m tests.sim.record_life SEED EVENTS FILE`."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from tests.sim.engine_world import World

from kvrelay import __version__
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.record.entry import Entry
from kvrelay.shared.engine.record.lines import Header, end_line, entry_line, header_line
from kvrelay.shared.engine.record.recorded import RecordedEngine


def record_life(seed: int, events: int, path: Path) -> Engine:
    """The engine after so many random events, without an orderly end.

    No line is made before all is over: an entry must not change with what happens after it.
    """
    world = World(random.Random(seed))
    engine, entries = world.engine, list[Entry]()
    world.engine = RecordedEngine(engine, entries.append)  # type: ignore[assignment]
    try:
        for _ in range(events):
            world.act()
    finally:
        state = engine.state
        header = Header(state.limits, state.pool.total, f"life {seed}", __version__)
        lines = [header_line(header), *map(entry_line, entries), end_line("closed")]
        path.write_bytes(b"".join(lines))
    return engine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("events", type=int)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    record_life(args.seed, args.events, args.file)
