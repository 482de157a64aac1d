"""The phases of a leg on one worker, and the legal moves between them.

    prefill   WAITING -> ASKING -> READY -> RUNNING -> HANDING_OFF -> ENDED
    decode    RESERVING -> RECEIVING -> RUNNING (-> WAITING when preempted) -> ENDED
    both      WAITING -> RUNNING -> ENDED

Any live phase may move to DRAINING (ended for everybody, but a transfer or a step still touches its
blocks), and on to ENDED when nothing touches them. A leg holds blocks only in the phases of
`HOLDING`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kvrelay.shared.errors import IllegalMove


class Phase(StrEnum):
    WAITING = "waiting"
    """Queued for computation; holds nothing."""
    ASKING = "asking"
    """Prefill asked decode for room; holds nothing here."""
    READY = "ready"
    """Decode granted room; waits for its first step here."""
    RUNNING = "running"
    """Holds blocks; `computed` chases the number of known tokens."""
    HANDING_OFF = "handing_off"
    """Prefill is done; its blocks stay pinned until decode published or the attempt ended."""
    RESERVING = "reserving"
    """Decode was asked for room and has none yet; holds nothing."""
    RECEIVING = "receiving"
    """Decode holds quarantined blocks that prefill is filling."""
    DRAINING = "draining"
    """Over for everybody; its blocks wait for the transfer or step that still touches them."""
    ENDED = "ended"


QUEUED: Final = frozenset({Phase.WAITING, Phase.ASKING, Phase.READY})
HOLDING: Final = frozenset({Phase.RUNNING, Phase.HANDING_OFF, Phase.RECEIVING, Phase.DRAINING})

QUIET_MS: Final[Mapping[Phase, int]] = MappingProxyType(
    {
        Phase.ASKING: 150_000,
        Phase.RESERVING: 150_000,
        Phase.RECEIVING: 150_000,
        Phase.HANDING_OFF: 30_000,
    }
)
"""Longest time without a word from anybody in the phases in which a worker waits for others; then
it ends the attempt by itself. Routers' deadlines are shorter (60 s for room, 120 s for a prompt,
10 s for its relay) and a router that is silent is noticed within 2 s, so it is for what was lost on
the way: a cancel, a grant of room, the word that all is published. In the other phases it waits for
its own engine, or (DRAINING) for a transfer, each chunk of which has a deadline."""

MOVES: Final = frozenset(
    {
        (Phase.WAITING, Phase.ASKING),
        (Phase.ASKING, Phase.READY),
        (Phase.READY, Phase.RUNNING),
        (Phase.WAITING, Phase.RUNNING),
        (Phase.RUNNING, Phase.WAITING),
        (Phase.RUNNING, Phase.HANDING_OFF),
        (Phase.RESERVING, Phase.RECEIVING),
        (Phase.RECEIVING, Phase.RUNNING),
        (Phase.DRAINING, Phase.ENDED),
        *((phase, Phase.DRAINING) for phase in Phase if phase not in (Phase.ENDED, Phase.DRAINING)),
    }
)


def check_move(key: str, before: Phase, after: Phase) -> None:
    """Raise `IllegalMove` unless the table has (before, after)."""
    if (before, after) not in MOVES:
        raise IllegalMove(f"leg {key}: {before} -> {after} is not a legal move")
