"""The settings of `kvrelay trace`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvrelay.shared.config import Named, Secrets, Settings


class TraceConfig(Settings):
    """Which request is shown, and by which router."""

    table: ClassVar[str] = "trace"

    request: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=128)]
    """The request's id, or that of its answer."""
    router: Annotated[str, Field(pattern=r"^https?://[^\s/]+/?$", max_length=300)] = (
        "http://127.0.0.1:8000"
    )
    """The router that served it; its admin port if it has one."""
    api_key: Secrets = ()
    """One of the router's API keys, if it wants them and has no admin port. Give it by environment
    or file: every user of the machine can read a flag."""
    as_json: Annotated[bool, Named(setting="json")] = False
    """One JSON object on stdout instead of the picture."""
