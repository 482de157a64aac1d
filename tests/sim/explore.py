"""Every order in which a small cluster's messages, steps and one fault can come, up to a depth.

Two legs, one prefill and one decode worker, the real leg machines and engines. A state is a value:
each thing that can happen next gives another one, equal ones are looked at once. From the last
depth on each state is led to its end in one order. Everywhere hold: the pools' books (L4), each
output index once and with the right token (L1), one end per leg (L5); at the end nobody waits
(L6) and nothing is held (L4, L9).

Simulated as in `tests.sim.cluster` but without time: channels keep their order, and any of them may
be the next. A chunk is read from the sender's memory when it arrives, which is as late as can be.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from tests.sim.model import BLOCK, BLOCK_BYTES, VOCAB, ChainMemory, reference

from kvrelay.services.router.choreography import (
    Action,
    Choose,
    Emit,
    Finish,
    LegMachine,
    Send,
    Stage,
    WorkerEnd,
)
from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import Plan
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.errors import KvrelayError
from kvrelay.shared.rpc.convert import finish_to_wire, leg_from_wire, ref_from_wire, ref_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.types import EndReason, LegRef, LegSpec, SamplingParams

BLOCKS = 6
MAX_TOKENS = BLOCK
"""In a step: a prompt of two blocks is computed, and relayed, in two chunks."""
LIMITS = EngineLimits(BLOCK, 2, MAX_TOKENS, BLOCKS * BLOCK, VOCAB, b"explore")
FAULTS = ("kill", "break", "drain", "leave", "flip", "drop", "duplicate")
_ENDS = {
    EndReason.FINISHED: pb.END_FINISHED,
    EndReason.CANCELLED: pb.END_CANCELLED,
    EndReason.FAILED: pb.END_FAILED,
}

Move = tuple[str, str]
"""What happens, and to whom or by which channel."""


@dataclass
class Nonces:
    """Picklable, unlike a closure."""

    last: int = 0

    def __call__(self) -> int:
        self.last += 1
        return self.last


@dataclass
class Worker:
    name: str
    engine: Engine = field(default_factory=lambda: Engine(LIMITS, BLOCKS))
    memory: ChainMemory = field(default_factory=lambda: ChainMemory(BLOCKS))
    awake: bool = False
    """Something happened since it found nothing to compute."""
    flying: Plan | None = None
    peers: dict[LegRef, str] = field(default_factory=dict)
    expected: dict[int, m.Expect] = field(default_factory=dict)
    stream: int = 0


@dataclass
class Client:
    machine: LegMachine
    expected: list[int]
    got: list[int] = field(default_factory=list)
    ends: list[KvrelayError | None] = field(default_factory=list)
    left: bool = False


class World:
    """One state. `moves` tells what can happen, `do` lets it."""

    def __init__(self, specs: list[LegSpec]) -> None:
        self.workers = {name: Worker(name) for name in ("P0", "D0")}
        self.known = {"P": "P0", "D": "D0"}
        """Whom the router takes for alive."""
        self.started = 0
        self.faulted = ""
        self.channels: dict[str, list[object]] = {}
        nonces = Nonces()
        self.clients = [
            Client(LegMachine(spec, 0, nonces), reference(spec.prompt, spec.sampling.max_tokens))
            for spec in specs
        ]
        for client in self.clients:
            self._perform(client, client.machine.begin())

    # ---- what can happen ---------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """In the ordinary course."""
        found = [("deliver", name) for name in self.channels]
        for worker in self.workers.values():
            if worker.flying is not None:
                found.append(("land", worker.name))
            elif worker.awake:
                found.append(("plan", worker.name))
        return found

    def faults(self, kinds: tuple[str, ...]) -> Iterator[Move]:
        if self.faulted:
            return
        for kind in kinds:
            if kind in ("kill", "break", "drain"):
                yield from ((kind, name) for name in self.workers)
            elif kind == "leave":
                yield from ((kind, str(at)) for at in range(len(self.clients)))
            else:
                yield from ((kind, name) for name in self.channels if name.startswith("relay"))

    def do(self, move: Move) -> None:
        what, whom = move
        if what in FAULTS:
            self.faulted = f"{what} {whom}"
        getattr(self, f"_{what}")(whom)
        self.check()

    # ---- the ordinary course -----------------------------------------------------------------

    def _put(self, channel: str, item: object) -> None:
        self.channels.setdefault(channel, []).append(item)

    def _take(self, channel: str) -> object:
        items = self.channels[channel]
        item = items.pop(0)
        if not items:
            del self.channels[channel]
        return item

    def _deliver(self, channel: str) -> None:
        kind, _, name = channel.partition(" ")
        item = self._take(channel)
        if kind == "told":
            assert isinstance(item, bytes)
            self._command(self.workers[name], pb.Command.FromString(item))
        elif kind == "says":
            assert isinstance(item, bytes)
            event = pb.Event.FromString(item)
            for client in self.clients:
                self._perform(client, client.machine.on_event(name, event))
        elif kind == "relay":
            sender, _, receiver = name.partition(">")
            assert isinstance(item, m.Push)
            self._chunk(self.workers[sender], self.workers[receiver], item)
        elif kind == "inside":
            self._tell(self.workers[name], item)  # type: ignore[arg-type]
        elif kind == "lost":
            for client in self.clients:
                self._perform(client, client.machine.worker_lost(name))

    def _plan(self, name: str) -> None:
        worker = self.workers[name]
        worker.flying, out = worker.engine.plan(MAX_TOKENS)
        worker.awake = worker.flying is not None
        self._out(worker, out)

    def _land(self, name: str) -> None:
        """A step computes when it ends: it writes as late as can be."""
        worker = self.workers[name]
        plan, worker.flying = worker.flying, None
        assert plan is not None
        self._out(worker, worker.engine.complete(plan, worker.memory.run(plan)))

    def _command(self, worker: Worker, command: pb.Command) -> None:
        kind = command.WhichOneof("kind")
        owner = f"router/{worker.stream}"
        event: m.Event
        if kind == "serve":
            ref = ref_from_wire(command.serve.ref)
            handoff = command.serve.HasField("decode")
            worker.peers[ref] = command.serve.decode.incarnation
            spec = leg_from_wire(ref.leg, command.serve.leg)
            event = m.Serve(owner, ref, spec, handoff, command.serve.decode.incarnation)
        elif kind == "reserve":
            ref = ref_from_wire(command.reserve.ref)
            spec = leg_from_wire(ref.leg, command.reserve.leg)
            event = m.Reserve(owner, ref, spec, command.reserve.prefill.incarnation)
        elif kind == "room":
            room = command.room
            runs = tuple(room.run_blocks)
            event = m.RoomGranted(ref_from_wire(room.ref), room.first_missing_token, runs)
        elif kind == "published":
            event = m.Published(ref_from_wire(command.published))
        else:
            event = m.Cancel(ref_from_wire(command.cancel))
        self._tell(worker, event)

    def _tell(self, worker: Worker, event: m.Event) -> None:
        worker.awake = True
        self._out(worker, worker.engine.handle(event))

    def _out(self, worker: Worker, out: list[m.Instruction]) -> None:
        for it in out:
            worker.awake = True
            if isinstance(it, m.Push):
                self._push(worker, it)
            elif isinstance(it, m.Abandon):
                self._abandon(worker, it.ref)
            elif isinstance(it, m.Expect):
                worker.expected[it.ref.nonce] = it
                if it.writer not in self.workers:
                    self._put(f"inside {worker.name}", m.RelayFailed(it.ref, "no such peer"))
            elif isinstance(it, m.Forget):
                worker.expected.pop(it.ref.nonce, None)
                self._put(f"inside {worker.name}", m.Forgotten(it.ref))
            elif it.owner == f"router/{worker.stream}":
                self._put(f"says {worker.name}", said(it).SerializeToString())

    # ---- the relay ---------------------------------------------------------------------------

    def _push(self, worker: Worker, push: m.Push) -> None:
        peer = worker.peers[push.ref]
        if peer in self.workers:
            self._put(f"relay {worker.name}>{peer}", push)
        else:
            self._put(f"inside {worker.name}", m.PushDone(push.ref, "the peer is lost"))

    def _abandon(self, worker: Worker, ref: LegRef) -> None:
        for channel in [c for c in self.channels if c.startswith(f"relay {worker.name}>")]:
            items = self.channels.pop(channel)
            for push in items:
                assert isinstance(push, m.Push)
                if push.ref == ref:
                    self._put(f"inside {worker.name}", m.PushDone(ref, "abandoned"))
                else:
                    self._put(channel, push)

    def _chunk(self, sender: Worker, receiver: Worker, push: m.Push, *, bad: bool = False) -> None:
        self._put(f"inside {sender.name}", m.PushDone(push.ref))
        expect = receiver.expected.get(push.ref.nonce)
        if expect is None:
            return  # into the sink
        first = (push.start - expect.first_missing) // BLOCK
        for source, target in zip(push.blocks, expect.blocks[first:], strict=False):
            data = b"\xaa" * BLOCK_BYTES if bad else sender.memory.view(source, 1)
            receiver.memory.view(target, 1)[:] = data
        if bad:
            self._put(f"inside {receiver.name}", m.RelayFailed(push.ref, "checksum"))
            return
        if push.last:
            del receiver.expected[push.ref.nonce]
        arrived = m.ChunkArrived(push.ref, push.start, push.end, push.last, push.token)
        self._put(f"inside {receiver.name}", arrived)

    # ---- faults ------------------------------------------------------------------------------

    def _kill(self, name: str) -> None:
        """Another start of it is there at once; that this one is gone is noticed later."""
        del self.workers[name]
        for channel in [*self.channels]:
            kind, _, ends = channel.partition(" ")
            if name not in ends.split(">"):
                continue
            items = self.channels.pop(channel)
            if kind == "relay" and not ends.startswith(name):
                sender = ends.partition(">")[0]
                for push in items:
                    assert isinstance(push, m.Push)
                    self._put(f"inside {sender}", m.PushDone(push.ref, "the peer is lost"))
        for other in self.workers.values():
            for expect in other.expected.values():
                if expect.writer == name:
                    self._put(f"inside {other.name}", m.RelayFailed(expect.ref, "the peer is lost"))
        self.started += 1
        again = f"{name[0]}{self.started}"
        self.workers[again] = Worker(again)
        self.known[name[0]] = again
        self._put(f"lost {name}", None)

    def _break(self, name: str) -> None:
        """The router's stream to a worker that is there still."""
        for kind in ("told", "says"):
            self.channels.pop(f"{kind} {name}", None)
        worker = self.workers[name]
        self._put(f"inside {name}", m.OwnerGone(f"router/{worker.stream}"))
        worker.stream += 1
        for client in self.clients:  # the router opens no other one before it has handled this
            self._perform(client, client.machine.worker_lost(name))

    def _drain(self, name: str) -> None:
        for client in self.clients:
            self._perform(client, client.machine.leave(name))

    def _leave(self, at: str) -> None:
        client = self.clients[int(at)]
        client.left = not client.ends  # else it crosses the end
        self._perform(client, client.machine.cancel())

    def _flip(self, channel: str) -> None:
        sender, _, receiver = channel.partition(" ")[2].partition(">")
        push = self._take(channel)
        assert isinstance(push, m.Push)
        self._chunk(self.workers[sender], self.workers[receiver], push, bad=True)

    def _drop(self, channel: str) -> None:
        """A damaged header: nobody knows what it meant."""
        push = self._take(channel)
        assert isinstance(push, m.Push)
        sender = channel.partition(" ")[2].partition(">")[0]
        self._put(f"inside {sender}", m.PushDone(push.ref))

    def _duplicate(self, channel: str) -> None:
        """Its header and body arrive twice."""
        push = self.channels[channel][0]
        assert isinstance(push, m.Push)
        self.channels[channel].insert(0, push)
        sender = channel.partition(" ")[2].partition(">")[0]
        self.workers[sender].engine.state.legs[push.ref].pushes += 1  # `PushDone` comes for both

    # ---- the router --------------------------------------------------------------------------

    def _perform(self, client: Client, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Emit):
                event = action.event
                assert event.index == len(client.got), "each index once, in order"
                client.got.append(event.token)
            elif isinstance(action, Send):
                if action.worker in self.workers:
                    self._put(f"told {action.worker}", action.command.SerializeToString())
            elif isinstance(action, Finish):
                client.ends.append(action.error)
            elif isinstance(action, Choose):
                prefill, decode = (end(self.known[role]) for role in "PD")
                self._perform(client, client.machine.assign(prefill, decode))

    # ---- what holds --------------------------------------------------------------------------

    def check(self) -> None:
        for worker in self.workers.values():
            worker.engine.state.check()
        for client in self.clients:
            assert client.got == client.expected[: len(client.got)], "a wrong token"
            assert len(client.ends) <= 1, "more than one end"

    def finish(self) -> None:
        """Lead it to its end, in one order, and check what is left."""
        for _ in range(10_000):
            moves = self.moves()
            if moves:
                self.do(moves[0])
                continue
            waiting = [c for c in self.clients if c.machine.stage is Stage.HANDING_OFF]
            if not waiting:
                break
            for client in waiting:  # the one deadline that another attempt follows
                self._perform(client, client.machine.expired(Stage.HANDING_OFF, 10.0))
        else:
            raise AssertionError("it goes on for ever")
        for client in self.clients:
            assert len(client.ends) == 1, f"{client.machine.spec.leg} waits for ever"
            if not client.left:
                assert client.ends == [None], client.ends
                assert client.got == client.expected, "cut short"
        for worker in self.workers.values():
            counts = worker.engine.state.pool.counts()
            assert (counts.in_use, counts.quarantined) == (0, 0), f"{worker.name} leaks"
            assert not worker.engine.state.legs and not worker.expected


def end(name: str) -> WorkerEnd:
    return WorkerEnd(name, pb.Peer(incarnation=name, scheme="explore", address=name.encode()))


def said(it: m.Instruction) -> pb.Event:
    """As `Node` says it."""
    ref = ref_to_wire(it.ref)
    if isinstance(it, m.NeedRoom):
        return pb.Event(need_room=ref)
    if isinstance(it, m.Room):
        room = pb.Room(ref=ref, first_missing_token=it.first_missing, run_blocks=it.run_blocks)
        return pb.Event(room=room)
    if isinstance(it, m.Started):
        return pb.Event(started=pb.Started(ref=ref, cached_tokens=it.cached))
    if isinstance(it, m.TokenOut):
        finish = finish_to_wire(it.finish)
        return pb.Event(token=pb.Token(ref=ref, index=it.index, token=it.token, finish=finish))
    if isinstance(it, m.PublishedOut):
        return pb.Event(published=pb.Published(ref=ref, relayed_tokens=it.tokens))
    assert isinstance(it, m.Ended)
    reason = _ENDS[it.reason]
    ended = pb.Ended(ref=ref, reason=reason, message=it.message, retryable=it.retryable)
    return pb.Event(ended=ended)


def explore(
    specs: list[LegSpec],
    depth: int,
    faults: tuple[str, ...] = FAULTS,
    begin: int = 0,
    order: int = 0,
) -> list[int]:
    """How many different states there are at each depth. Raises `AssertionError` with the way.

    The first `begin` moves are made in one order: of all that can happen the first, or with
    `order` -1 the last.
    """
    world = World(specs)
    for _ in range(begin):
        if not (moves := world.moves()):
            return []
        world.do(moves[order])
    first = pickle.dumps(world, protocol=5)
    layer: dict[bytes, tuple[bytes, tuple[Move, ...]]] = {key(first): (first, ())}
    seen = {*layer}
    sizes = []
    for _ in range(depth):
        following: dict[bytes, tuple[bytes, tuple[Move, ...]]] = {}
        for state, way in layer.values():
            world = pickle.loads(state)
            moves = world.moves()
            if not moves:
                checked(state, way)
            for move in (*moves, *world.faults(faults)):
                branch = pickle.loads(state)
                after = (*way, move)
                try:
                    branch.do(move)
                except AssertionError as error:
                    raise AssertionError(f"{error} after {after}") from error
                reached = pickle.dumps(branch, protocol=5)
                digest = key(reached)
                if digest not in seen:
                    seen.add(digest)
                    following[digest] = (reached, after)
        layer = following
        sizes.append(len(layer))
    for state, way in layer.values():
        checked(state, way)
    return sizes


def key(state: bytes) -> bytes:
    return blake2b(state, digest_size=16).digest()


def checked(state: bytes, way: tuple[Move, ...]) -> None:
    world: World = pickle.loads(state)
    try:
        world.finish()
    except AssertionError as error:
        raise AssertionError(f"{error} in the end of {way}") from error


def two_legs() -> list[LegSpec]:
    """They share a block of their prompts, and have two tokens to say after it."""
    params = SamplingParams(max_tokens=3)
    prompts = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7))
    return [LegSpec(f"r{at}/0", prompt, params) for at, prompt in enumerate(prompts)]
