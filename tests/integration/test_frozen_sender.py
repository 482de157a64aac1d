"""A sender freezes in mid-transfer, the memory is used again, and it wakes: the short form."""

from __future__ import annotations

from pathlib import Path

import pytest
from loadtests.frozen_sender import freezes


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_what_a_frozen_sender_still_sends_changes_nothing(tmp_path: Path, transport: str) -> None:
    with freezes(tmp_path, transport, seed=3) as cluster:
        for _ in range(2):
            cluster.once()
    assert cluster.hit_tokens > 0, "what was published meanwhile was read again"
