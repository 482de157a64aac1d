"""Which records may be closed, and how sure a sweeper must be."""

from __future__ import annotations

from kvrelay.services.router.sweeping import GRACE_NS, AbsenceWatch, Word, closable
from kvrelay.shared.store.records import OpenRecord

LOOK = GRACE_NS // 3


def record(leg: str, prefill: str = "p", decode: str = "d") -> OpenRecord:
    return OpenRecord(leg, "r", False, "decoding", 0, 1, prefill, decode, 9, 3, 1)


def looks(watch: AbsenceWatch, start: int, count: int, *absent: str) -> list[frozenset[str]]:
    return [watch.overdue(set(absent), start + n * LOOK) for n in range(count)]


def test_a_router_is_overdue_once_it_was_missing_for_a_lease_period() -> None:
    nobody, r = frozenset[str](), frozenset({"r"})
    assert looks(AbsenceWatch(), 10**12, 5, "r") == [nobody, nobody, nobody, r, r]


def test_one_that_was_back_meanwhile_is_given_the_whole_period_again() -> None:
    watch = AbsenceWatch()
    assert not any(looks(watch, 0, 3, "r", "s"))
    assert looks(watch, 3 * LOOK, 1, "s") == [frozenset({"s"})]
    assert not any("r" in seen for seen in looks(watch, 4 * LOOK, 3, "r", "s"))


def test_an_outage_or_a_pause_of_the_sweeper_proves_nothing() -> None:
    watch = AbsenceWatch()
    assert not any(looks(watch, 0, 3, "r"))
    watch.blind()
    assert not any(looks(watch, 3 * LOOK, 3, "r"))
    later = 6 * LOOK + GRACE_NS
    assert not any(looks(watch, later, 3, "r"))
    assert looks(watch, later + 3 * LOOK, 1, "r") == [frozenset({"r"})]


def test_a_record_is_closed_when_no_worker_of_it_speaks_against() -> None:
    gone = Word(attached=False)
    rows = [record("a"), record("b"), record("c", decode="e"), record("w", "", "")]

    def closed(**words: Word | None) -> str:
        return "".join(each.leg for each in closable(rows, words))

    assert closed(p=gone, d=gone, e=gone) == "abcw"
    assert closed() == "abcw", "its workers are gone, too"
    assert closed(d=Word(attached=True), e=gone) == "cw", "the router talks to a worker"
    assert closed(p=gone, d=Word(False, frozenset("a"))) == "bcw", "blocks are being let go"
    assert closed(p=gone, d=gone, e=None) == "abw", "one does not answer"
    assert closed(p=None) == "w"
    assert closed(other=Word(attached=True)) == "abcw", "not asked about these"
