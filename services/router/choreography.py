"""One leg's way through the cluster, as a machine without IO.

    CHOOSING -> QUEUED -> PREFILLING -> HANDING_OFF -> DECODING -> DONE

`assign` names the workers, `on_event` takes what they say, `worker_lost`, `expired` and `cancel`
end or re-route. Each returns actions for the caller to perform in order. Whatever happens, there is
exactly one `Finish`, each output index is emitted once, and every worker that may hold something of
an attempt that is over has been told so.

A lost half raises the attempt: the prompt and the tokens already emitted are computed elsewhere and
the answer continues at the next index, so it is the one that an undisturbed run would have given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.told import failure_of, tells_all, token_event
from kvrelay.shared.errors import (
    DeadlineExceeded,
    KvrelayError,
    TokenConflict,
    WorkerFailed,
)
from kvrelay.shared.rpc.convert import leg_to_wire, ref_from_wire, ref_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.telemetry.labels import AttemptCause
from kvrelay.shared.types import LegRef, LegSpec

MAX_ATTEMPTS = 4
"""Of one leg; those that a draining worker asked for are not counted."""


class Stage(StrEnum):
    CHOOSING = "choosing"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """A worker as a leg sees it."""

    incarnation: str
    peer: pb.Peer


@dataclass(frozen=True, slots=True)
class Send:
    worker: str
    command: pb.Command


@dataclass(frozen=True, slots=True)
class Emit:
    event: TokenEvent


@dataclass(frozen=True, slots=True)
class Enter:
    """The leg is in another stage: its deadline begins anew."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class Choose:
    """Find workers for the next attempt, better not these."""

    excluded: frozenset[str]


@dataclass(frozen=True, slots=True)
class Finish:
    """The one end of the leg; `error` None when it was answered."""

    error: KvrelayError | None = None


Action: TypeAlias = Send | Emit | Enter | Choose | Finish


class LegMachine:
    def __init__(
        self,
        spec: LegSpec,
        number: int,
        nonce: Callable[[], int],
        traceparent: str = "",
    ) -> None:
        self.spec = spec
        self.number = number
        self.stage = Stage.CHOOSING
        self.tokens: list[int] = list(spec.seen)
        """All output tokens emitted so far, those given in `spec.seen` included."""
        self.attempt = -1
        self.moves = 0
        """Attempts that were given up though nothing had failed."""
        self.failed: set[str] = set()
        self.cached_tokens: int | None = None
        """Prompt tokens that no attempt had to compute; None until one began to."""
        self.cause = AttemptCause.FIRST
        self.answered = False
        """The leg came to its own end, rather than being cancelled or failing."""
        self._nonce = nonce
        self._traceparent = traceparent
        self._ref = LegRef(spec.leg, 0, 0)
        self._prefill: WorkerEnd | None = None
        self._decode: WorkerEnd | None = None
        self._told: set[str] = set()
        """Workers that were given this attempt and have not said that it ended there."""
        self._early: dict[int, pb.Token] = {}
        self._first = 0
        """Index of the attempt's first token."""
        self._published_there = False
        """Decode has all that prefill computed."""
        self._out: list[Action] = []

    # ---- what happens ------------------------------------------------------------------------

    def begin(self) -> list[Action]:
        self._out.append(Choose(frozenset()))
        return self._take()

    def assign(self, prefill: WorkerEnd, decode: WorkerEnd | None) -> list[Action]:
        """Start the next attempt on these workers; without `decode`, `prefill` serves it whole."""
        if self.stage is not Stage.CHOOSING:
            return []
        self.attempt += 1
        self._ref = LegRef(self.spec.leg, self.attempt, self._nonce())
        remaining = self.spec.sampling.max_tokens - len(self.tokens)
        self._prefill = prefill
        self._decode = decode if remaining > 1 else None  # one token needs no reservation
        self._first = len(self.tokens)
        self._published_there = False
        serve = pb.Serve(
            ref=ref_to_wire(self._ref),
            leg=leg_to_wire(self._current_spec()),
            traceparent=self._traceparent,
        )
        if self._decode is not None:
            serve.decode.CopyFrom(self._decode.peer)
        self._send(prefill.incarnation, pb.Command(serve=serve))
        self._enter(Stage.QUEUED)
        return self._take()

    def on_event(self, worker: str, event: pb.Event) -> list[Action]:
        """What a worker said about this leg; anything about another attempt is stale."""
        if self.stage is Stage.DONE or ref_from_wire(event_ref(event)) != self._ref:
            return []
        kind = event.WhichOneof("kind")
        if kind == "need_room":
            self._reserve()
        elif kind == "room":
            self._pass_on(event.room)
        elif kind == "started":
            self._started(event.started)
        elif kind == "token":
            self._token(event.token)
        elif kind == "published":
            self._published()
        elif kind == "ended":
            self._ended(worker, event.ended)
        return self._take()

    def worker_lost(self, worker: str) -> list[Action]:
        """A worker's lease or stream ended. Decode may be lost before it was told anything."""
        needed = self.needs(worker)
        if not (needed or (worker in self._told and self.stage is not Stage.DONE)):
            return []
        self._told.discard(worker)
        self.failed.add(worker)
        if needed:
            self._again(f"worker {worker} is lost", self._lost_half(worker))
        return self._take()

    def leave(self, worker: str) -> list[Action]:
        """The worker is about to go: what it does here is continued elsewhere."""
        if self.needs(worker):
            self.moves += 1
            self._again(f"worker {worker} drains", AttemptCause.DRAIN)
        return self._take()

    def expired(self, stage: Stage, seconds: float) -> list[Action]:
        """A stage took too long: a handoff that stalls is a lost half, the rest is final."""
        if self.stage is not stage:
            return []
        message = f"{stage.replace('_', ' ')} took more than {seconds:g} s"
        if stage is Stage.HANDING_OFF:
            self.failed |= self._told
            self._again(message, AttemptCause.TRANSFER_FAULT)
        else:
            self._finish(DeadlineExceeded(message))
        return self._take()

    def cancel(self) -> list[Action]:
        """Nobody wants more of this leg."""
        if self.stage is not Stage.DONE:
            self._finish(None)
        return self._take()

    def complete(self) -> list[Action]:
        """The answer is whole without more tokens (a stop string was seen in its text)."""
        self.answered = True
        return self.cancel()

    def fail(self, error: KvrelayError) -> list[Action]:
        """The caller cannot go on with it (no worker, shutting down)."""
        if self.stage is not Stage.DONE:
            self._finish(error)
        return self._take()

    def needs(self, worker: str) -> bool:
        """Whether there is an attempt that cannot go on without this worker."""
        if self.stage in (Stage.CHOOSING, Stage.DONE):
            return False
        ends = [end.incarnation for end in (self._prefill, self._decode) if end is not None]
        return worker in ends

    @property
    def ref(self) -> LegRef:
        """Of the latest attempt."""
        return self._ref

    @property
    def told(self) -> frozenset[str]:
        """Workers that may hold something of it."""
        return frozenset(self._told)

    @property
    def split(self) -> bool:
        """Whether this attempt is shared between two workers."""
        return self._decode is not None

    @property
    def nonce(self) -> int:
        """Of this attempt."""
        return self._ref.nonce

    @property
    def prefill_incarnation(self) -> str:
        return self._prefill.incarnation if self._prefill is not None else ""

    @property
    def decode_incarnation(self) -> str:
        return self._decode.incarnation if self._decode is not None else ""

    # ---- moves -------------------------------------------------------------------------------

    def _take(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _current_spec(self) -> LegSpec:
        return replace(self.spec, seen=tuple(self.tokens))

    def _send(self, worker: str, command: pb.Command) -> None:
        if command.WhichOneof("kind") in ("serve", "reserve"):
            self._told.add(worker)
        self._out.append(Send(worker, command))

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._out.append(Enter(stage))

    def _reserve(self) -> None:
        assert self._prefill is not None
        if self._decode is None or self._decode.incarnation in self._told:
            return
        reserve = pb.Reserve(
            ref=ref_to_wire(self._ref),
            leg=leg_to_wire(self._current_spec()),
            prefill=self._prefill.peer,
            traceparent=self._traceparent,
        )
        self._send(self._decode.incarnation, pb.Command(reserve=reserve))

    def _pass_on(self, room: pb.Room) -> None:
        if self._prefill is not None:
            self._send(self._prefill.incarnation, pb.Command(room=room))

    def _started(self, started: pb.Started) -> None:
        if self.stage is Stage.QUEUED:
            # What an attempt that was lost had computed may be in a cache now: the least counts.
            least = len(self.spec.prompt) if self.cached_tokens is None else self.cached_tokens
            self.cached_tokens = min(least, started.cached_tokens)
            self._enter(Stage.PREFILLING)

    def _token(self, token: pb.Token) -> None:
        """Emit in order of index, each once; decode repeats token 0 of the handoff.

        What prefill tells of that one may come after the repetition, which tells nothing.
        """
        index, early = token.index, self._early.get(token.index)
        known = self.tokens[index] if index < len(self.tokens) else early and early.token
        if known is not None and known != token.token:
            self._finish(TokenConflict(f"token {index} came with two values; the answer is void"))
            return
        if index >= len(self.tokens) and (early is None or tells_all(self.spec, token)):
            self._early[index] = token
        while (ready := self._early.get(len(self.tokens))) and tells_all(self.spec, ready):
            del self._early[ready.index]
            event = token_event(self.number, ready)
            self._out.append(Emit(event))
            self.tokens.append(ready.token)
            if event.finish is not None:
                self.answered = True
                self._finish(None)
                return
            self._progress()
        self._let_go_of_prefill()

    def _progress(self) -> None:
        """A token came: the deadline of the stage it is in begins anew."""
        if self._decode is None:
            self._enter(Stage.DECODING)
        elif self.stage in (Stage.QUEUED, Stage.PREFILLING):
            self._enter(Stage.HANDING_OFF)
        elif self.stage is Stage.DECODING:
            self._enter(Stage.DECODING)

    def _published(self) -> None:
        if self._prefill is not None and self._prefill.incarnation in self._told:
            published = pb.Command(published=ref_to_wire(self._ref))
            self._out.append(Send(self._prefill.incarnation, published))
        if self.stage is not Stage.DONE:
            self._published_there = True
            self._enter(Stage.DECODING)
            self._let_go_of_prefill()

    def _let_go_of_prefill(self) -> None:
        """From here on its loss is nobody's: decode has all, and it alone had nothing to tell."""
        how = self.spec.sampling
        told = how.logprobs is None and how.prompt_logprobs is None
        if self._published_there and (told or len(self.tokens) > self._first):
            self._prefill = None

    def _ended(self, worker: str, ended: pb.Ended) -> None:
        self._told.discard(worker)
        if ended.reason == pb.END_FINISHED or not self.needs(worker):
            return
        if ended.retryable or ended.reason == pb.END_CANCELLED:
            self._again(ended.message or "a worker dropped the request", self._end_cause(worker))
        else:
            self._finish(failure_of(ended.message))

    def _lost_half(self, worker: str) -> AttemptCause:
        if self._decode is None:  # one worker for both: what it was at
            decodes = self.stage is Stage.DECODING
        else:
            decodes = worker == self._decode.incarnation
        return AttemptCause.DECODE_LOST if decodes else AttemptCause.PREFILL_LOST

    def _end_cause(self, worker: str) -> AttemptCause:
        if self.stage is Stage.DECODING or self._decode is None:
            return self._lost_half(worker)
        return AttemptCause.TRANSFER_FAULT

    def _again(self, problem: str, cause: AttemptCause) -> None:
        """Give this attempt up everywhere and look for workers to go on from the last token."""
        self.cause = cause
        self._release_workers()
        if self.attempt + 1 - self.moves >= MAX_ATTEMPTS:
            self._finish(WorkerFailed(f"given up after {MAX_ATTEMPTS} attempts: {problem}"))
            return
        self._early.clear()
        self._enter(Stage.CHOOSING)
        self._out.append(Choose(frozenset(self.failed)))

    def _release_workers(self) -> None:
        for worker in sorted(self._told):
            self._out.append(Send(worker, pb.Command(cancel=ref_to_wire(self._ref))))
        self._told.clear()

    def _finish(self, error: KvrelayError | None) -> None:
        """The one terminal action; a worker that has ended by itself ignores its cancel."""
        self._release_workers()
        self.stage = Stage.DONE
        self._out.append(Finish(error))


def event_ref(event: pb.Event) -> pb.Ref:
    """The attempt that an event is about; an empty one for an event that is about none."""
    kind = event.WhichOneof("kind")
    if kind == "need_room":
        return event.need_room
    if kind is None or kind == "draining":
        return pb.Ref()
    ref: pb.Ref = getattr(event, kind).ref
    return ref
