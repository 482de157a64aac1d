"""Logprobs and steered answers over real workers: split and unsplit, bit for bit the same."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import pytest
import redis
from tests.integration.clients import token_ids
from tests.stack import Stack

from kvrelay.services.router.choreography import Action, Emit, Finish, LegMachine, Send, WorkerEnd
from kvrelay.services.router.dispatch import worker_end
from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.links import Link, keep_library
from kvrelay.services.router.policy import NO_LOAD, LiveWorker
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.records import WorkerRecord
from kvrelay.shared.types import LegSpec, Role, SamplingParams

ROUTER = "e" * 32
SECONDS = 20.0


class Conductor:
    """A router of a few legs, over real streams; in no register."""

    def __init__(self, stack: Stack) -> None:
        keep_library()
        with redis.Redis.from_url(stack.redis_url) as client:
            kept = [client.get(key) for key in client.scan_iter(Keys("kvrelay").worker("*"))]
        self.records = [WorkerRecord.from_json(text) for text in kept if text is not None]
        self.links = {
            record.incarnation: Link(
                record.incarnation, record.grpc_address, ROUTER, self._said, lambda _: None
            )
            for record in self.records
        }
        self.events: list[TokenEvent] = []
        self.over = asyncio.Event()
        self._nonces = itertools.count(0xF000)

    def end_of(self, *roles: Role) -> WorkerEnd:
        record = next(record for record in self.records if record.role in roles)
        return worker_end(LiveWorker(record, NO_LOAD))

    async def answer(
        self, spec: LegSpec, prefill: WorkerEnd, decode: WorkerEnd | None
    ) -> list[TokenEvent]:
        for link in self.links.values():
            await link.tried.wait()
        self.events.clear()
        self.over.clear()
        self.machine = LegMachine(spec, 0, lambda: next(self._nonces))
        self.machine.begin()
        self._perform(self.machine.assign(prefill, decode))
        async with asyncio.timeout(SECONDS):
            await self.over.wait()
        return self.events[:]

    async def close(self) -> None:
        for link in self.links.values():
            await link.close()

    def _said(self, worker: str, event: pb.Event) -> None:
        self._perform(self.machine.on_event(worker, event))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.links[action.worker].send(action.command)
            elif isinstance(action, Emit):
                self.events.append(action.event)
            elif isinstance(action, Finish):
                assert action.error is None, action.error
                self.over.set()


def specs() -> list[LegSpec]:
    rng = random.Random("told")
    few = tuple(sorted(token_ids(rng, 8)))
    plain = SamplingParams(seed=5, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    steered = SamplingParams(
        seed=6,
        max_tokens=40,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias=((few[0], 1.5),),
        allowed_token_ids=few,
        bad_words=((few[1], few[2]), (few[3],)),
        logprobs=0,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=0)
    one = SamplingParams(max_tokens=1, logprobs=20, prompt_logprobs=20)
    prompts = [tuple(token_ids(rng, count)) for count in (1, 16, 100, 333)]
    return [
        LegSpec(f"{ROUTER}/{at}", prompt, how)
        for at, (prompt, how) in enumerate(
            itertools.product(prompts, (plain, steered, greedy, one))
        )
    ]


async def answers(stack: Stack, *, split: bool) -> list[list[TokenEvent]]:
    conductor = Conductor(stack)
    prefill = conductor.end_of(Role.PREFILL, Role.BOTH)
    decode = conductor.end_of(Role.DECODE) if split else None
    try:
        # Twice, in the other order: what the cache has now must not tell other numbers.
        first = [await conductor.answer(spec, prefill, decode) for spec in specs()]
        again = [await conductor.answer(again_of(spec), prefill, decode) for spec in specs()[::-1]]
        assert again[::-1] == first
        return first
    finally:
        await conductor.close()


def again_of(spec: LegSpec) -> LegSpec:
    return LegSpec(f"{spec.leg}again", spec.prompt, spec.sampling)


@pytest.mark.leaks_allowed  # gRPC's threads
async def test_split_answers_tell_what_unsplit_ones_do(split: Stack, unsplit: Stack) -> None:
    both = [await answers(split, split=True), await answers(unsplit, split=False)]
    assert both[0] == both[1]
    for spec, events in zip(specs(), both[0], strict=True):
        how = spec.sampling
        assert len(events) == how.max_tokens
        for event in events:
            assert (event.logprobs is None) == (how.logprobs is None)
            if event.logprobs is not None:
                assert len(event.logprobs.top) == how.logprobs
        of_prompt = events[0].prompt_logprobs
        assert len(of_prompt) == (0 if how.prompt_logprobs is None else len(spec.prompt) - 1)
        assert {len(each.top) for each in of_prompt} <= {how.prompt_logprobs}
        if how.allowed_token_ids:
            assert {event.token for event in events} <= {*how.allowed_token_ids}
