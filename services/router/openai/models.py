"""GET /v1/models and /v1/models/{id}: a lookup among the served names, never a path."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvrelay.services.router.validate import ModelCard, model_not_found


class Models:
    """The handlers of both routes."""

    def __init__(self, card: Callable[[], ModelCard | None]) -> None:
        self._card = card

    async def all(self, request: Request) -> JSONResponse:
        card = self._card()
        names = () if card is None else card.names
        data = [_entry(card, name) for name in names if card is not None]
        return JSONResponse({"object": "list", "data": data})

    async def one(self, request: Request) -> JSONResponse:
        """Raises `RequestError` 404."""
        name: str = request.path_params["name"]
        card = self._card()
        if card is None or name not in card.names:
            raise model_not_found(name)
        return JSONResponse(_entry(card, name))


def _entry(card: ModelCard, name: str) -> dict[str, str | int]:
    return {
        "id": name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "kvrelay",
        "root": card.names[0],
        "max_model_len": card.max_model_len,
    }
