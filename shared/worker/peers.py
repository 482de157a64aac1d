"""Who is at the other end of a relay."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.shared.transfer.protocol import Address


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One start of one worker, and where its transport can be reached."""

    incarnation: str
    address: Address
