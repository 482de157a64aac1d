"""Drives UCX from the event loop: progress when its descriptor is readable, and sleep otherwise.

ucxx's own loop integration is replaced, for measured reasons (0.52): an `await` of its requests is
a loop over `sleep(0)`, so one pending receive burns a core; its blocking mode arms the descriptor
once and then polls for ever; and its 1 Hz tick can swallow the wake-up of a message. Here the
library's coroutines are stepped by hand after each progress, and the worker is armed before every
sleep: a pending receive costs nothing, and a wake-up cannot be lost, because UCX refuses to arm
while there are events that were not progressed.

ucx-py differs in names and in yielding real futures; both are handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import time
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, Final

from kvrelay.shared.errors import TransferError
from kvrelay.shared.transfer.ucx_faults import UcxFaults

_MODULES: Final = ("ucxx", "ucp")
_POLL_S: Final = 0.001
"""Of one poll, beyond the round that is under way: tokens and heartbeats wait for it."""
_SETTLE_ROUNDS: Final = 8
_BUSY_POLLS: Final = 200
_BUSY_PAUSE_S: Final = 0.001
"""UCX cannot sleep while a full queue of a peer holds a send back. If that lasts, poll gently."""


class UcxLibrary:
    """The installed UCX module, initialised: one per process, because ucxx has one worker."""

    def __init__(self) -> None:
        self.module = _import_ucx()
        self.errors: tuple[type[Exception], ...] = (self.module.exceptions.UCXError,)
        blocking: dict[str, dict[str, Any]] = {
            "ucxx": {"progress_mode": "blocking"},
            "ucp": {"blocking_progress_mode": True},
        }
        loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
        try:
            self.module.init(**blocking[self.module.__name__])
        except (*self.errors, RuntimeError, OSError) as error:
            raise TransferError(f"UCX cannot start: {error}") from error
        self._replaced = asyncio.all_tasks() - before  # the loop integration of ucxx
        # Its wrapper around `loop.close` would keep the worker, and all it has open, till the end.
        vars(loop).pop("close", None)
        self._faults = UcxFaults()
        self._context = self.module.core._get_ctx()
        self._worker = self._context.worker
        self._progress_once: Callable[[], bool] | None = getattr(
            self._worker, "progress_once", None
        )

    async def take_over(self) -> None:
        """End the library's own loop integration, which holds its worker.

        Until its error is taken, a cancelled task and what it ran hold each other: a cycle that
        stays for ever where the objects of a process' start are never looked through again.
        """
        for task in self._replaced:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._replaced.clear()

    @property
    def descriptor(self) -> int:
        if hasattr(self._context, "epoll_fd"):
            return int(self._context.epoll_fd)
        return int(self._worker.epoll_file_descriptor)

    def progress(self) -> bool:
        """Move things on for a bounded time; False when there is nothing left to do now."""
        if self._progress_once is None:
            self._worker.progress()
            return False
        ends_s = time.perf_counter() + _POLL_S
        while self._progress_once():
            if time.perf_counter() > ends_s:
                return True
        return False

    def arm(self) -> bool:
        """Ask for a wake-up by the descriptor; False when there is something to progress first."""
        return bool(self._worker.arm())

    def probe(self, tag: int, expected_bytes: int) -> int | None:
        """The size of the next message of `tag`, None if none is here. Takes nothing.

        ucx-py does not tell the size: then it is `expected_bytes`, and its receive checks it.
        """
        if self.module.__name__ == "ucp":
            return expected_bytes if self._worker.tag_probe(tag) else None
        found = self._worker.tag_probe(self.module.types.Tag(tag))
        return int(found.length) if found.matched else None

    def transports(self) -> set[str]:
        """Names of what UCX may use here, e.g. {'posix', 'cma', 'tcp'}."""
        lines = self.module.get_ucp_context_info().splitlines()
        resources = (line.split() for line in lines if "resource" in line and "flags" in line)
        return {words[-1].split("/")[0] for words in resources}

    def setting(self, name: str) -> str:
        """The value in force of one UCX setting, without its `UCX_`."""
        return str(self.module.get_config().get(name, ""))

    def close(self) -> None:
        """Destroy the worker. Every endpoint must have been dropped."""
        del self._context, self._worker, self._progress_once
        self.module.reset()
        self._faults.close()


def _import_ucx() -> ModuleType:
    for name in _MODULES:
        try:
            importlib.import_module(f"{name}.exceptions")
            return importlib.import_module(name)
        except ImportError:
            continue
    raise TransferError("UCX is not installed: pip install 'kvrelay[ucx]', or use transport 'tcp'")


def ucx_installed() -> bool:
    """Whether a UCX module can be found. Loads nothing."""
    return any(importlib.util.find_spec(name) for name in _MODULES)


class Operation:
    """One call of the library in flight; `on_end` hears its error, or None, exactly once."""

    __slots__ = ("_awaited", "_call", "_on_end")

    def __init__(
        self, call: Coroutine[Any, Any, Any], on_end: Callable[[Exception | None], None]
    ) -> None:
        self._call = call
        self._on_end = on_end
        self._awaited: asyncio.Future[Any] | None = None

    def step(self, errors: tuple[type[Exception], ...]) -> bool:
        """Let the call look at its request; True once it has ended."""
        if self._awaited is not None and not self._awaited.done():
            return False
        try:
            self._awaited = self._call.send(None)
        except StopIteration:
            self._on_end(None)
        except errors as error:
            self._on_end(error)
        else:
            return False
        return True


class UcxProgress:
    """The loop's side: wakes up for UCX events and steps what is in flight."""

    def __init__(self, library: UcxLibrary, on_progress: Callable[[], None]) -> None:
        self._library = library
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._operations: list[Operation] = []
        self._next_poll: asyncio.Handle | None = None
        self._busy_polls = 0
        self._descriptor = library.descriptor
        self._loop.add_reader(self._descriptor, self.poll)
        self.kick()

    def run(
        self, call: Coroutine[Any, Any, Any], on_end: Callable[[Exception | None], None]
    ) -> None:
        """Start a call. `on_end` may be called before this returns."""
        operation = Operation(call, on_end)
        if not operation.step(self._library.errors):
            self._operations.append(operation)
        self.kick()

    def kick(self) -> None:
        """Poll soon: whoever gave UCX something to do must, since it may not be armed for it."""
        if self._next_poll is None:
            self._next_poll = self._loop.call_soon(self.poll)

    def poll(self) -> None:
        """Progress, step every operation, and arm for the next event."""
        if self._next_poll is not None:
            self._next_poll.cancel()
            self._next_poll = None
        more = self._library.progress()
        self._on_progress()
        self.step()
        if not more and self._library.arm():
            self._busy_polls = 0
            return
        self._busy_polls = 0 if more else self._busy_polls + 1
        if self._busy_polls < _BUSY_POLLS:
            self.kick()
        elif self._next_poll is None:
            self._next_poll = self._loop.call_later(_BUSY_PAUSE_S, self.poll)

    def step(self) -> None:
        """Let every operation in flight see whether it has ended."""
        operations, self._operations = self._operations, []
        alive = [each for each in operations if not each.step(self._library.errors)]
        self._operations.extend(alive)

    def settle(self) -> None:
        """Give what an abort has ended the few turns it needs to come out as ended."""
        for _ in range(_SETTLE_ROUNDS):
            self._library.progress()
            self.step()
        self.kick()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._next_poll is not None:
            self._next_poll.cancel()
        self._operations.clear()
