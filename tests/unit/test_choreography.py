"""A leg's way through the cluster, fed event by event."""

from __future__ import annotations

import itertools

import pytest

from kvrelay.services.router.choreography import (
    MAX_ATTEMPTS,
    Action,
    Choose,
    Emit,
    Enter,
    Finish,
    LegMachine,
    Send,
    Stage,
    WorkerEnd,
)
from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.observe import outcome_of
from kvrelay.services.router.told import failure_of
from kvrelay.shared.errors import DeadlineExceeded, RequestError, TokenConflict, WorkerFailed
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.telemetry.labels import AttemptCause, Outcome
from kvrelay.shared.types import FinishReason, LegSpec, Logprobs, SamplingParams


def end(name: str) -> WorkerEnd:
    return WorkerEnd(name, pb.Peer(incarnation=name, scheme="loopback", address=name.encode()))


P, D, P2, D2 = end("P"), end("D"), end("P2"), end("D2")


def machine(max_tokens: int = 4) -> LegMachine:
    nonces = itertools.count(100)
    spec = LegSpec("r/0", (1, 2, 3), SamplingParams(max_tokens=max_tokens))
    m = LegMachine(spec, 0, lambda: next(nonces))
    assert m.begin() == [Choose(frozenset())]
    return m


def ref(attempt: int = 0) -> pb.Ref:
    return pb.Ref(leg="r/0", attempt=attempt, nonce=100 + attempt)


def token(index: int, value: int, finish: pb.Finish = pb.FINISH_NONE, attempt: int = 0) -> pb.Event:
    return pb.Event(token=pb.Token(ref=ref(attempt), index=index, token=value, finish=finish))


def ended(reason: pb.End = pb.END_FAILED, retryable: bool = True, attempt: int = 0) -> pb.Event:
    return pb.Event(
        ended=pb.Ended(ref=ref(attempt), reason=reason, message="x", retryable=retryable)
    )


def sent(actions: list[Action]) -> list[tuple[str, str | None]]:
    return [(a.worker, a.command.WhichOneof("kind")) for a in actions if isinstance(a, Send)]


def handed_over(m: LegMachine) -> None:
    """Bring it to the moment after token 0 left prefill."""
    m.assign(P, D)
    m.on_event("P", pb.Event(need_room=ref()))
    m.on_event("D", pb.Event(room=pb.Room(ref=ref(), run_blocks=[1])))
    m.on_event("P", pb.Event(started=pb.Started(ref=ref())))
    m.on_event("P", token(0, 7))


def test_a_split_answer_from_queue_to_finish() -> None:
    m = machine(max_tokens=3)
    actions = m.assign(P, D)
    assert sent(actions) == [("P", "serve")] and actions[1] == Enter(Stage.QUEUED)
    assert sent(m.on_event("P", pb.Event(need_room=ref()))) == [("D", "reserve")]
    assert sent(m.on_event("D", pb.Event(room=pb.Room(ref=ref(), run_blocks=[1])))) == [
        ("P", "room")
    ]
    assert m.on_event("P", pb.Event(started=pb.Started(ref=ref()))) == [Enter(Stage.PREFILLING)]
    assert m.on_event("P", token(0, 7)) == [
        Emit(TokenEvent(0, 0, 7)),
        Enter(Stage.HANDING_OFF),
    ]
    actions = m.on_event("D", pb.Event(published=pb.Published(ref=ref())))
    assert sent(actions) == [("P", "published")] and actions[1] == Enter(Stage.DECODING)
    assert m.on_event("D", token(0, 7)) == [], "decode repeats token 0; the client sees it once"
    m.on_event("D", token(1, 8))
    actions = m.on_event("D", token(2, 9, pb.FINISH_LENGTH))
    assert actions[0] == Emit(TokenEvent(0, 2, 9, FinishReason.LENGTH))
    assert actions[-1] == Finish(None) and m.answered


def test_tokens_are_emitted_in_order_of_index_whatever_the_order_of_arrival() -> None:
    m = machine()
    m.assign(P, D)
    m.on_event("P", pb.Event(need_room=ref()))
    m.on_event("D", pb.Event(published=pb.Published(ref=ref())))
    assert m.on_event("D", token(1, 8)) == []
    actions = m.on_event("P", token(0, 7))
    assert [a.event.token for a in actions if isinstance(a, Emit)] == [7, 8]


def test_an_answer_that_ends_at_token_zero_gives_the_reservation_back() -> None:
    m = machine()
    m.assign(P, D)
    m.on_event("P", pb.Event(need_room=ref()))
    actions = m.on_event("P", token(0, 2, pb.FINISH_STOP))
    assert ("D", "cancel") in sent(actions) and actions[-1] == Finish(None)


def test_one_token_makes_no_reservation_at_all() -> None:
    m = machine(max_tokens=1)
    (send, _) = m.assign(P, D)
    assert isinstance(send, Send) and not send.command.serve.HasField("decode")


def test_cancel_tells_every_worker_that_was_told_of_it() -> None:
    m = machine()
    m.assign(P, D)
    m.on_event("P", pb.Event(need_room=ref()))
    actions = m.cancel()
    assert sent(actions) == [("D", "cancel"), ("P", "cancel")]
    assert actions[-1] == Finish(None) and not m.answered
    assert m.cancel() == [] and m.on_event("P", token(0, 7)) == []


def test_prefill_lost_before_publish_raises_the_attempt_elsewhere() -> None:
    m = machine()
    handed_over(m)
    actions = m.worker_lost("P")
    assert sent(actions) == [("D", "cancel")]
    assert actions[-1] == Choose(frozenset({"P"}))
    (send, *_) = m.assign(P2, D)
    assert isinstance(send, Send)
    assert send.command.serve.ref == ref(1)
    assert list(send.command.serve.leg.seen) == [7], "what the client saw is forced"


@pytest.mark.parametrize("begun", [False, True])
def test_a_worker_lost_that_serves_alone_is_named_by_what_it_was_at(begun: bool) -> None:
    m = machine()
    m.assign(D, None)
    if begun:
        m.on_event("D", token(0, 7))
    m.worker_lost("D")
    assert m.cause is (AttemptCause.DECODE_LOST if begun else AttemptCause.PREFILL_LOST)


def test_prefill_lost_after_publish_is_nobodys_loss() -> None:
    m = machine()
    handed_over(m)
    m.on_event("D", pb.Event(published=pb.Published(ref=ref())))
    assert m.worker_lost("P") == []


def test_decode_lost_before_it_was_told_anything_raises_the_attempt_elsewhere() -> None:
    """Else prefill would ask a worker for room that nobody can ask any more."""
    m = machine()
    m.assign(P, D)
    actions = m.worker_lost("D")
    assert sent(actions) == [("P", "cancel")]
    assert actions[-1] == Choose(frozenset({"D"}))
    assert sent(m.assign(P, D2)) == [("P", "serve")]
    assert sent(m.on_event("P", pb.Event(need_room=ref(1)))) == [("D2", "reserve")]


def test_decode_lost_in_mid_answer_continues_at_the_next_index() -> None:
    m = machine()
    handed_over(m)
    m.on_event("D", pb.Event(published=pb.Published(ref=ref())))
    m.on_event("D", token(1, 8))
    assert m.worker_lost("D")[-1] == Choose(frozenset({"D"}))
    m.assign(P, D2)
    assert m.on_event("D", token(2, 99)) == [], "the old attempt is stale"
    actions = m.on_event("P", token(2, 9, attempt=1))
    assert actions[0] == Emit(TokenEvent(0, 2, 9))


def test_a_retryable_end_is_retried_and_a_final_one_is_not() -> None:
    retried = machine()
    handed_over(retried)
    assert isinstance(retried.on_event("D", ended())[-1], Choose)
    final = machine()
    handed_over(final)
    finish = final.on_event("P", ended(retryable=False))[-1]
    assert isinstance(finish, Finish) and isinstance(finish.error, WorkerFailed)


def test_attempts_are_bounded() -> None:
    m = machine()
    for attempt in range(MAX_ATTEMPTS):
        m.assign(P, D)
        actions = m.on_event("P", ended(attempt=attempt))
    finish = actions[-1]
    assert isinstance(finish, Finish) and isinstance(finish.error, WorkerFailed)


def test_two_values_for_one_index_void_the_answer() -> None:
    m = machine()
    handed_over(m)
    finish = m.on_event("D", token(0, 8))[-1]
    assert isinstance(finish, Finish) and isinstance(finish.error, TokenConflict)
    assert outcome_of(finish.error) is Outcome.CONFLICT


def test_a_stalled_handoff_is_retried_and_other_deadlines_are_final() -> None:
    m = machine()
    handed_over(m)
    assert m.expired(Stage.PREFILLING, 1.0) == [], "a timer of a stage that is over"
    assert isinstance(m.expired(Stage.HANDING_OFF, 1.0)[-1], Choose)
    queued = machine()
    queued.assign(P, D)
    finish = queued.expired(Stage.QUEUED, 60.0)[-1]
    assert isinstance(finish, Finish) and isinstance(finish.error, DeadlineExceeded)


def test_a_leg_that_was_asked_for_in_vain_is_the_client_s_to_change() -> None:
    refused = failure_of("grammar: the answer cannot go on: its next token takes too long")
    assert isinstance(refused, RequestError) and refused.status == 400
    for message in ("the model step failed: ValueError", "relay: lost", "grammar"):
        assert isinstance(failure_of(message), WorkerFailed)


def test_a_worker_that_drains_is_left_and_that_is_no_failure() -> None:
    m = machine(max_tokens=30)
    m.assign(P, D)
    for attempt in range(2 * MAX_ATTEMPTS):
        m.on_event("P", pb.Event(need_room=ref(attempt)))
        actions = m.leave("D")
        assert m.cause is AttemptCause.DRAIN
        assert sent(actions) == [("D", "cancel"), ("P", "cancel")]
        assert actions[-1] == Choose(frozenset()), (
            "who drains is not to be avoided as one that fails"
        )
        assert m.leave("D") == [], "it was left already"
        m.assign(P, D)
    for attempt in range(2 * MAX_ATTEMPTS, 3 * MAX_ATTEMPTS):
        actions = m.on_event("P", ended(attempt=attempt))
        m.assign(P, D)
    finish = actions[-1]
    assert isinstance(finish, Finish) and isinstance(finish.error, WorkerFailed)


def test_who_is_not_needed_may_drain_unnoticed() -> None:
    m = machine()
    handed_over(m)
    m.on_event("D", pb.Event(published=pb.Published(ref=ref())))
    assert not m.needs("P") and m.leave("P") == []


def telling(event: pb.Event, prompt: int = 0) -> pb.Event:
    """The same with logprobs, and those of so many tokens of the prompt."""
    event.token.logprobs.CopyFrom(pb.Logprobs(chosen=[-0.5], ranks=[1]))
    if prompt:
        event.token.prompt_logprobs.CopyFrom(
            pb.Logprobs(chosen=[-1.0] * prompt, ranks=[2] * prompt)
        )
    return event


def telling_machine() -> LegMachine:
    nonces = itertools.count(100)
    how = SamplingParams(max_tokens=4, logprobs=0, prompt_logprobs=0)
    m = LegMachine(LegSpec("r/0", (1, 2, 3), how), 0, lambda: next(nonces))
    m.begin()
    return m


def emitted(actions: list[Action]) -> list[TokenEvent]:
    return [action.event for action in actions if isinstance(action, Emit)]


TOLD = Logprobs(-0.5, 1)
OF_PROMPT = (Logprobs(-1.0, 2),) * 2


def test_what_prefill_tells_is_waited_for_when_decode_is_quicker() -> None:
    m = telling_machine()
    m.assign(P, D)
    m.on_event("P", pb.Event(need_room=ref()))
    m.on_event("D", pb.Event(published=pb.Published(ref=ref())))
    assert emitted(m.on_event("D", token(0, 7))) == [], "decode only repeats it"
    assert emitted(m.on_event("D", telling(token(1, 8)))) == []
    assert emitted(m.on_event("P", telling(token(0, 7), prompt=2))) == [
        TokenEvent(0, 0, 7, None, TOLD, OF_PROMPT),
        TokenEvent(0, 1, 8, None, TOLD),
    ]
    assert m.worker_lost("P") == [], "it has told all, and decode has all"


def test_a_prefill_that_is_lost_before_it_told_is_needed_though_decode_has_all() -> None:
    m = telling_machine()
    m.assign(P, D)
    m.on_event("P", pb.Event(need_room=ref()))
    m.on_event("D", pb.Event(published=pb.Published(ref=ref())))
    m.on_event("D", token(0, 7))
    m.on_event("D", telling(token(1, 8)))
    actions = m.worker_lost("P")
    assert sent(actions) == [("D", "cancel")] and actions[-1] == Choose(frozenset({"P"}))
    (send, *_) = m.assign(P2, D)
    assert isinstance(send, Send) and list(send.command.serve.leg.seen) == []
    actions = m.on_event("P2", telling(token(0, 7, attempt=1), prompt=2))
    assert emitted(actions) == [TokenEvent(0, 0, 7, None, TOLD, OF_PROMPT)]


def test_a_continuation_tells_its_first_token_and_not_the_prompt() -> None:
    m = telling_machine()
    m.assign(P, D)
    m.on_event("P", telling(token(0, 7), prompt=2))
    m.worker_lost("D")
    m.assign(P2, D2)
    assert emitted(m.on_event("D2", token(1, 8, attempt=1))) == []
    actions = m.on_event("P2", telling(token(1, 8, attempt=1)))
    assert emitted(actions) == [TokenEvent(0, 1, 8, None, TOLD)]


@pytest.mark.parametrize("first", ["P", "D"])
def test_a_first_token_that_prefill_and_decode_do_not_agree_on_is_an_error(first: str) -> None:
    m = telling_machine()
    m.assign(P, D)
    m.on_event("P", pb.Event(need_room=ref()))
    said = {"P": telling(token(0, 7), prompt=2), "D": token(0, 6)}
    m.on_event(first, said.pop(first))
    [(other, event)] = said.items()
    end = m.on_event(other, event)[-1]
    assert isinstance(end, Finish) and isinstance(end.error, TokenConflict)
