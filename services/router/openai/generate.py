"""The two generating routes: parse, validate, generate, deliver; each ends its generation once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from kvrelay.services.router.gate import GateRules
from kvrelay.services.router.generation import Cluster, Generation
from kvrelay.services.router.openai import sse
from kvrelay.services.router.openai.chat import ChatWording
from kvrelay.services.router.openai.completions import CompletionWording
from kvrelay.services.router.openai.errors import Failure, closing, failure_of
from kvrelay.services.router.openai.exchange import (
    Bodies,
    BodyLimits,
    ClientGone,
    Reply,
    header,
    label_of,
    while_connected,
)
from kvrelay.services.router.openai.observer import EdgeObserver, Outcome
from kvrelay.services.router.openai.parse import parse_body
from kvrelay.services.router.openai.schema import ChatBody, CompletionBody
from kvrelay.services.router.openai.transcript import Transcript
from kvrelay.services.router.openai.wording import Delta, Timing, Wording
from kvrelay.services.router.sandbox import TakesLong
from kvrelay.services.router.structured_pool import Grammars, with_grammar
from kvrelay.services.router.validate import ModelCard, Origin, valid_chat, valid_completion
from kvrelay.shared.errors import KvrelayError, Overloaded, Unavailable, WorkerFailed
from kvrelay.shared.types import ValidRequest

T = TypeVar("T")
_TRACE_HEADERS = ("traceparent", "tracestate")
_TRACE_CHARACTERS = 512
TIMING = b"x-kvrelay-timing"
"""With 1, the answer tells where its time went."""
INLINE_TOLD = 1024
"""Logprobs of more tokens than these are not worded on the event loop."""
CHARACTERS_OF_ONE = 16
"""A parser of tool calls reads as many in the time that one token's logprobs take."""


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """Limits of the HTTP edge."""

    body: BodyLimits = field(default_factory=BodyLimits)
    send_s: float = 30.0
    """A client that takes nothing for this long is taken for gone."""
    inline_bytes: int = 8 << 10
    """Larger bodies are parsed and tokenized on a thread, off the event loop."""
    large_at_once: int = 1
    """Of those, how many at the same time; it bounds the memory they take."""
    large_s: float = 10.0
    """Longest wait for a turn at that; then it is a 429."""
    lenient_fields: bool = False
    """Fields that are not known are left out instead of refused."""
    gate: GateRules = field(default_factory=GateRules)
    """Who may come in at all."""
    grammars: Grammars = field(default_factory=Grammars)
    """Whoever made these settings closes it."""


@dataclass(frozen=True, slots=True)
class Draws:
    """All that differs from run to run."""

    request_id: Callable[[], str]
    seed: Callable[[], int]
    wall_s: Callable[[], int]
    now_ns: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Route:
    """One of the generating routes."""

    path: str
    parse: Callable[..., ValidRequest]
    """Of a body, a `ModelCard`, an `Origin`, and whether it is to be `lenient`."""
    wording: Callable[[ValidRequest, ModelCard, int], Wording]


def _completion(
    body: bytearray, card: ModelCard, origin: Origin, lenient: bool = False
) -> ValidRequest:
    return valid_completion(parse_body(CompletionBody, body, lenient=lenient), card, origin)


def _chat(body: bytearray, card: ModelCard, origin: Origin, lenient: bool = False) -> ValidRequest:
    return valid_chat(parse_body(ChatBody, body, lenient=lenient), card, origin)


COMPLETIONS = Route("/v1/completions", _completion, CompletionWording)
CHAT = Route("/v1/chat/completions", _chat, ChatWording)


@dataclass(frozen=True, slots=True)
class Edge:
    """What both routes share."""

    cluster: Cluster
    card: Callable[[], ModelCard | None]
    settings: EdgeSettings
    observer: EdgeObserver
    draws: Draws
    bodies: Bodies
    large: asyncio.Semaphore

    def origin(self, scope: Scope) -> Origin:
        traces = {name: header(scope, name.encode()) for name in _TRACE_HEADERS}
        return Origin(
            request_id=self.draws.request_id(),
            seed=self.draws.seed(),
            received_ns=self.draws.now_ns(),
            client_label=label_of(scope),
            timing=header(scope, TIMING) == "1",
            trace_headers={k: v for k, v in traces.items() if 0 < len(v) <= _TRACE_CHARACTERS},
        )

    def begin(self, scope: Scope, send: Send) -> tuple[Origin, Reply]:
        origin = self.origin(scope)
        named = ("x-request-id", origin.client_label or origin.request_id)
        return origin, Reply(send, (named,), self.settings.send_s)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A place among those that parse a large body. Raises `Overloaded` when none gets free."""
        try:
            async with asyncio.timeout(self.settings.large_s):
                await self.large.acquire()
        except TimeoutError:
            message = f"No large request was taken up for {self.settings.large_s:g} s"
            raise Overloaded(message, retry_after_s=self.settings.large_s) from None
        try:
            yield
        finally:
            self.large.release()

    async def work(self, job: Callable[[ModelCard], T], card: ModelCard, body_bytes: int) -> T:
        """What `job` makes of a body: here, or in its turn on a thread when it takes long."""
        if body_bytes <= self.settings.inline_bytes:
            with contextlib.suppress(TakesLong):
                return job(card.brief())
        async with self.turn():
            return await asyncio.to_thread(job, card)


class GenerateEndpoint:
    """An ASGI application for one route."""

    def __init__(self, route: Route, edge: Edge) -> None:
        self._route = route
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin, reply = self._edge.begin(scope, send)
        try:
            try:
                request, card = await self._request(scope, receive, origin)
                await while_connected(receive, self._answer(request, card, reply))
            except KvrelayError as error:
                await self._fail(reply, failure_of(error))
        except ClientGone:
            return

    async def _fail(self, reply: Reply, failure: Failure) -> None:
        if reply.started:
            await reply.write(sse.event(failure.body()) + sse.DONE, last=True)
            return
        self._edge.observer.errored(self._route.path, failure.status, reply.taken)
        await reply.whole(failure.status, failure.body(), closing(failure))

    async def _request(
        self, scope: Scope, receive: Receive, origin: Origin
    ) -> tuple[ValidRequest, ModelCard]:
        """With it the body is gone: an answer may take long."""
        async with self._edge.bodies.json(scope, receive) as body:
            card = self._edge.card()
            if card is None:
                raise Unavailable("No model is being served yet")
            lenient = self._edge.settings.lenient_fields
            parse = partial(self._route.parse, body, origin=origin, lenient=lenient)
            request = await self._edge.work(parse, card, len(body))
        checked = with_grammar(request, self._edge.settings.grammars, card)
        if request.constraint is None:
            return await checked, card
        return await while_connected(receive, checked), card

    async def _answer(self, request: ValidRequest, card: ModelCard, reply: Reply) -> None:
        transcript = Transcript(request, card.tokenizer)
        outcome = Outcome.FAILED
        self._edge.observer.accepted(request)
        try:
            wording = self._route.wording(request, card, self._edge.draws.wall_s())
            await self._deliver(request, transcript, wording, reply)
            outcome = Outcome.FINISHED
        except (ClientGone, asyncio.CancelledError):
            outcome = Outcome.CLIENT_GONE
            raise
        finally:
            self._edge.observer.ended(request, outcome, transcript.usage)

    async def _deliver(
        self, request: ValidRequest, transcript: Transcript, wording: Wording, reply: Reply
    ) -> None:
        generation = self._edge.cluster.generate(request)
        reply.taken = True
        try:
            if request.stream:
                await self._stream(request, generation, transcript, wording, reply)
            else:
                await _collect(generation, transcript)
        finally:
            await generation.aclose()
            transcript.cached_tokens = generation.cached_tokens
        timing = generation.timing_ms() if request.form.timing else {}
        if not request.stream:
            choices = transcript.choices()
            told = sum(_told(choice.answer) for choice in choices)
            body = await _worded(partial(wording.whole, choices, transcript.usage, timing), told)
            self._edge.observer.first_byte(request)
            await reply.whole(200, body, server_timing(timing))
            return
        last = wording.last(transcript.usage if request.include_usage else None, timing)
        await reply.write(last + sse.DONE, last=True)

    async def _stream(
        self,
        request: ValidRequest,
        generation: Generation,
        transcript: Transcript,
        wording: Wording,
        reply: Reply,
    ) -> None:
        async for event in generation:
            deltas, cut = transcript.take(event)
            if cut:
                generation.stop_leg(event.leg)
            so_far = transcript.usage if request.form.continuous_usage else None
            data = b""
            for delta in deltas:
                chunk = partial(wording.chunk, event.leg, delta, so_far)
                data += await _worded(chunk, _told(delta))
            if not reply.started:
                self._edge.observer.first_byte(request)
                await reply.start(200, sse.HEADERS)
            if data:
                await reply.write(data)
            if transcript.complete:
                return
        raise WorkerFailed("the cluster's events ended before every leg did")


def server_timing(timing: Timing) -> tuple[tuple[str, str], ...]:
    """As browsers and their tools show it."""
    told = ", ".join(f"{name.removesuffix('_ms')};dur={ms:.3f}" for name, ms in timing.items())
    return (("server-timing", told),) if told else ()


async def _collect(generation: Generation, transcript: Transcript) -> None:
    async for event in generation:
        if transcript.take(event).cut:
            generation.stop_leg(event.leg)
        if transcript.complete:
            return
    raise WorkerFailed("the cluster's events ended before every leg did")


def _told(delta: Delta) -> int:
    listed = len(delta.tokens) + len(delta.echoed) + len(delta.prompt_logprobs or ())
    return listed + len(delta.text) // CHARACTERS_OF_ONE


async def _worded(word: Callable[[], bytes], told: int) -> bytes:
    """Many logprobs, or long texts, are worded on a thread: no other stream waits for them."""
    return word() if told <= INLINE_TOLD else await asyncio.to_thread(word)
