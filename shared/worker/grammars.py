"""Legs whose answer must be something: they wait here until their grammar is compiled.

A thread compiles, so no step waits for it; what it takes, some milliseconds, passes before the
engine hears of the leg at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from kvrelay.shared.engine import messages as m
from kvrelay.shared.errors import BadGrammar
from kvrelay.shared.grammar.store import GrammarStore
from kvrelay.shared.types import EndReason, LegRef

log = logging.getLogger(__name__)

_Arrival: TypeAlias = m.Serve | m.Reserve


class GrammarGate:
    """Of one session; on its event loop."""

    def __init__(
        self,
        grammars: GrammarStore,
        post: Callable[[m.Event], None],
        end: Callable[[m.Ended], None],
    ) -> None:
        """`end` hears of legs that end here, before the engine knew them."""
        self._grammars = grammars
        self._post, self._end = post, end
        self._loop = asyncio.get_running_loop()
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: dict[LegRef, _Arrival] = {}
        self._open: set[LegRef] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, arrival: _Arrival) -> None:
        """To the engine, at once or as soon as its grammar is there."""
        grammar = arrival.spec.sampling.grammar
        if not grammar:
            self._post(arrival)
            return
        ref, seen = arrival.ref, arrival.spec.seen
        if ref in self._open:
            return  # it was sent twice
        self._open.add(ref)
        self._waiting[ref] = arrival
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        compiling = self._thread.submit(self._grammars.open, ref.key, grammar, seen)
        compiling.add_done_callback(lambda done: self._call(self._compiled, ref, done.exception()))

    def cancel(self, ref: LegRef) -> bool:
        """Whether the leg waited here; then that is its end."""
        arrival = self._waiting.pop(ref, None)
        if arrival is not None:
            self._end(m.Ended(arrival.owner, ref, EndReason.CANCELLED))
        return arrival is not None

    def owner_gone(self, owner: str) -> None:
        for ref in [ref for ref, leg in self._waiting.items() if leg.owner == owner]:
            self.cancel(ref)

    def ended(self, ref: LegRef) -> None:
        """The leg is over: nobody asks for its grammar again."""
        if ref in self._open and ref not in self._waiting:
            self._open.discard(ref)
            self._grammars.close(ref.key)

    def close(self) -> None:
        """Blocks until nothing is compiled any more; the engine has stopped before."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._waiting.clear()
        for ref in [*self._open]:
            self.ended(ref)

    def _call(self, then: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(then, *args)

    def _compiled(self, ref: LegRef, error: BaseException | None) -> None:
        arrival = self._waiting.pop(ref, None)
        if arrival is None:
            self._grammars.close(ref.key)  # it ended meanwhile
        elif error is None:
            self._post(arrival)
        else:
            if not isinstance(error, BadGrammar):
                log.error("a grammar could not be compiled", exc_info=error)
            problem = str(error) if isinstance(error, BadGrammar) else type(error).__name__
            message = f"grammar: {problem}"
            self._end(m.Ended(arrival.owner, ref, EndReason.FAILED, message))
