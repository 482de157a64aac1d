"""The settings of `kvrelay top`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvrelay.shared.config import Named, Secrets, Settings


class TopConfig(Settings):
    """Which router is looked at, and how often."""

    table: ClassVar[str] = "top"

    router: Annotated[str, Field(pattern=r"^https?://[^\s/]+/?$", max_length=300)] = (
        "http://127.0.0.1:8000"
    )
    """Where the router can be reached; its admin port if it has one."""
    api_key: Secrets = ()
    """One of the router's API keys, if it wants them and has no admin port. Give it by environment
    or file: every user of the machine can read a flag."""
    once: bool = False
    """Show it once and end."""
    as_json: Annotated[bool, Named(setting="json")] = False
    """One JSON object on stdout, once, instead of tables."""
    requests: Annotated[int, Field(ge=1, le=200)] = 12
    """How many of the newest requests are shown."""
    every_s: Annotated[float, Field(ge=0.2, le=60)] = 1.0
    """Time between two looks, in seconds."""
