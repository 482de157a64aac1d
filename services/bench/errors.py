"""What can go wrong in a benchmark, in one line for a person."""

from __future__ import annotations

from kvrelay.shared.errors import ConfigError


class BenchError(ConfigError):
    """A peer that is not set up, a system that ended, or a setting that cannot be measured."""
