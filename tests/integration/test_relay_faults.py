"""1,000 chunks over real TCP with faults of each kind: what arrives is right, or its attempt fails.

The sender and the receiver are the workers' own, over the faulty transport that `--chaos` makes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from kvrelay.shared.chaos.decide import Chaos
from kvrelay.shared.chaos.plan import ChaosPlan, Fault, Step
from kvrelay.shared.engine.messages import (
    ChunkArrived,
    Expect,
    Forgotten,
    Push,
    PushDone,
    RelayFailed,
)
from kvrelay.shared.telemetry.metrics import WorkerGauges, WorkerMetrics, render
from kvrelay.shared.transfer.faulty import FaultyTransport
from kvrelay.shared.transfer.tcp import TcpTransport
from kvrelay.shared.types import BlockId, Incarnation, LegRef
from kvrelay.shared.worker import leftovers
from kvrelay.shared.worker import receiver as receiving
from kvrelay.shared.worker.peers import PeerInfo
from kvrelay.shared.worker.receiver import Receiver
from kvrelay.shared.worker.sender import Sender

PREFILL, DECODE = Incarnation("a" * 32), Incarnation("b" * 32)
BLOCK, BLOCK_BYTES, BLOCKS = 16, 512, 4
TRANSFERS = 1000
BODY_S = 0.25
LINGER_S = 0.8
PATIENCE_S = 0.6
"""Longer than a body is waited for here: then nothing more comes of an attempt."""


@dataclass
class End:
    """One pool, and what its worker was told."""

    memory: bytearray = field(default_factory=lambda: bytearray(BLOCKS * BLOCK_BYTES))
    reports: asyncio.Queue[object] = field(default_factory=asyncio.Queue)
    metrics: WorkerMetrics = field(
        default_factory=lambda: WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), {})
    )

    def view(self, first: int, count: int) -> memoryview:
        return memoryview(self.memory)[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]

    def faults(self) -> dict[str, int]:
        text = render(self.metrics.registry)[0].decode()
        lines = [line for line in text.splitlines() if line.startswith("kvrelay_transfer_faults_t")]
        found = {line.split('"')[1]: round(float(line.split()[-1])) for line in lines}
        return {kind: count for kind, count in found.items() if count}


async def relay(
    plan: ChaosPlan, patience_s: float
) -> tuple[Counter[str], Counter[str], dict[str, int]]:
    """Two chunks a transfer, one transfer after the other: (ends, injected, detected)."""
    injected: Counter[str] = Counter()

    def count(step: Step, fault: Fault) -> None:
        injected[f"{step} {fault}"] += 1

    source, target = End(), End()
    out = FaultyTransport(TcpTransport("127.0.0.1"), Chaos(plan, "prefill-0", "prefill", count))
    into = TcpTransport("127.0.0.1")
    writer = PeerInfo(PREFILL, await out.listen())
    reader = PeerInfo(DECODE, await into.listen())
    sender = Sender(out, PREFILL, source.view, source.reports.put_nowait, source.metrics)
    receiver = Receiver(into, DECODE, target.view, target.reports.put_nowait, target.metrics)
    rng, ends = random.Random(plan.seed), Counter[str]()
    blocks = tuple(BlockId(i) for i in range(BLOCKS))
    for number in range(TRANSFERS):
        ref = LegRef(f"r{number}/0", 0, rng.getrandbits(48))
        source.memory[:] = rng.randbytes(len(source.memory))
        receiver.expect(Expect(ref, PREFILL, 0, BLOCKS * BLOCK, BLOCK, blocks), writer)
        for chunk in range(2):
            half = BLOCKS // 2
            mine = blocks[chunk * half : (chunk + 1) * half]
            tokens = (chunk * half * BLOCK, (chunk + 1) * half * BLOCK)
            last = chunk == 1
            push = Push(ref, chunk, *tokens, mine, (half,), last, 5, 0)
            sender.push(push, reader)
        ends[await outcome(ref, source, target, patience_s)] += 1
        receiver.forget(ref)
        while not isinstance(await target.reports.get(), Forgotten):
            pass
        for _ in range(2):
            assert isinstance(await source.reports.get(), PushDone)
    if into.kept_bytes:
        await asyncio.sleep(1.5 * LINGER_S)  # the time that strays have to be let go of
    ends["stray bytes"] = into.kept_bytes
    await sender.close()
    await receiver.close()
    await out.close()
    await into.close()
    return ends, injected, target.faults()


async def outcome(ref: LegRef, source: End, target: End, patience_s: float) -> str:
    """What decode's engine would make of it: published with these bytes, failed, or overdue."""
    received = 0
    try:
        async with asyncio.timeout(patience_s):
            while True:
                report = await target.reports.get()
                if isinstance(report, RelayFailed):
                    return "failed"
                if not isinstance(report, ChunkArrived) or report.ref != ref:
                    continue
                assert report.start == received, "in order, each once"
                received = report.end
                if report.last:
                    return "right" if target.memory == source.memory else "wrong"
    except TimeoutError:
        return "overdue"


def every(nth: int, fault: str, step: str) -> dict[str, object]:
    return {"step": step, "fault": fault, "nth": nth, "delay_s": 0.02}


HEADER, BODY = "chunk.header", "chunk.body"


@pytest.mark.parametrize(
    ("step", "fault", "nth", "counted"),
    [
        (HEADER, "flip", 201, {"corrupt": 9}),
        (HEADER, "truncate", 201, {"corrupt": 9}),
        (HEADER, "drop", 201, {"gap": 5}),
        (HEADER, "duplicate", 201, {"timeout": 9}),
        (HEADER, "reorder", 201, {"gap": 5}),
        (HEADER, "delay", 21, {}),
        (BODY, "flip", 7, {"corrupt": 285}),
        (BODY, "truncate", 7, {"corrupt": 285}),
        (BODY, "drop", 201, {"timeout": 9}),
        (BODY, "duplicate", 7, {}),
        (BODY, "reorder", 21, {}),
        (BODY, "delay", 21, {}),
    ],
)
async def test_a_fault_of_a_chunk_is_counted_by_kind_and_never_becomes_a_token(
    monkeypatch: pytest.MonkeyPatch, step: str, fault: str, nth: int, counted: dict[str, int]
) -> None:
    """Every other fault hits a last chunk: a header that is lost then shows no gap."""
    # Where nothing may be detected, a machine that is busy otherwise must not be either.
    monkeypatch.setattr(receiving, "BODY_DEADLINE_S", BODY_S if counted else 20 * BODY_S)
    monkeypatch.setattr(leftovers, "LINGER_S", LINGER_S)
    plan = ChaosPlan.model_validate({"seed": 5, "rules": [every(nth, fault, step)]})
    ends, injected, detected = await relay(plan, PATIENCE_S if counted else 20 * PATIENCE_S)
    print(f"{step} {fault}: {dict(ends)}, injected {dict(injected)}, detected {detected}")
    strays = ends.pop("stray bytes")
    assert strays == 0, "nothing is left in the transport"
    assert ends.total() == TRANSFERS and ends["wrong"] == 0
    assert injected == {f"{step} {fault}": 2 * TRANSFERS // nth}
    assert TRANSFERS - ends["right"] <= 2 * TRANSFERS // nth
    assert {kind: detected.get(kind, 0) for kind in counted} == counted
    if not counted:
        assert detected == {} and ends["right"] == TRANSFERS
