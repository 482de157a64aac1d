"""Where a prompt is computed: hand-computed costs, and what holds for any cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.services.router.backlog import Waiting
from kvrelay.services.router.policy import LiveWorker
from kvrelay.services.router.route import Mode, Site, Sites, Terms, choose, routes
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, LoadRecord, WorkerRecord
from kvrelay.shared.telemetry.labels import RouteKind
from kvrelay.shared.types import Incarnation, Role

IDLE = Waiting()
SPLIT, LOCAL = RouteKind.SPLIT, RouteKind.LOCAL


def site(
    name: str,
    *,
    held: int = 0,
    rate: float = 1000.0,
    waiting: Waiting = IDLE,
    share: int = 0,
    free_blocks: int = 1000,
) -> Site:
    """A worker of 16-token blocks that decodes 100 tokens/s and relays 20 times `rate`."""
    record = WorkerRecord(
        incarnation=Incarnation(name),
        role=Role.PREFILL if name.startswith("p") else Role.DECODE,
        name=name,
        model="m",
        grpc_address="a:1",
        metrics_address="",
        transfer_scheme="tcp",
        transfer_address=b"",
        fingerprint=dict.fromkeys(FINGERPRINT_FIELDS, "x"),
        block_size=16,
        pool_blocks=1000,
        max_model_len=16_000,
        max_num_seqs=64,
    )
    load = LoadRecord(0, 0, 0, free_blocks, 1000, rate, 100.0, 20 * rate)
    return Site(LiveWorker(record, load), held, waiting, share)


def pair(p: Site, d: Site) -> Sites:
    return Sites((p,), (d,))


def test_the_terms_of_both_routes() -> None:
    p = site("p", held=160, waiting=Waiting(tokens=500, legs=1))
    d = site("d", held=480, rate=500.0, waiting=Waiting(tokens=100, legs=4))
    split, local = routes(1000, pair(p, d))
    assert (split.kind, local.kind) == (SPLIT, LOCAL)
    assert split.terms == Terms(
        wait_s=0.5, compute_s=0.84, overhead_s=0.003, exposed_s=0.0, crowd_s=0.04
    )
    assert local.terms == Terms(wait_s=0.2, compute_s=1.04, crowd_s=0.04, harm_s=4.16)
    assert split.terms.ttft_s == pytest.approx(1.343)
    assert local.terms.cost_s == pytest.approx(1.24 * 1.05 + 0.04)
    assert choose(1000, pair(p, d)) == local


def test_a_transfer_slower_than_the_computing_makes_the_second_token_late() -> None:
    p, d = site("p", held=896), site("d")
    load = replace(p.worker.load, relay_tokens_per_s=2000.0)
    p = replace(p, worker=replace(p.worker, load=load))
    (split, _) = routes(1000, pair(p, d))
    assert split.terms.exposed_s == pytest.approx(1000 / 2000 - 104 / 1000)


def test_an_idle_decode_worker_spares_the_question_for_room() -> None:
    assert choose(1000, pair(site("p"), site("d"))).kind is LOCAL


def test_a_way_that_took_longer_on_top_lately_costs_that() -> None:
    on_top = {SPLIT: 0.08, LOCAL: 0.01}
    d = site("d", waiting=Waiting(legs=4))
    sites = Sites((site("p"),), (d,), overhead_s=on_top)
    assert [route.terms.overhead_s for route in routes(100, sites)] == [0.08, 0.01]
    assert choose(100, sites).kind is LOCAL
    assert choose(2000, sites).kind is SPLIT


def test_running_answers_are_worth_a_handoff() -> None:
    d = site("d", waiting=Waiting(legs=1))
    assert choose(1000, pair(site("p"), d)).kind is SPLIT


@pytest.mark.parametrize(("p_rate", "kind"), [(953.0, SPLIT), (945.0, LOCAL)])
def test_a_first_token_waits_a_twentieth_at_most_for_running_answers(
    p_rate: float, kind: RouteKind
) -> None:
    d = site("d", waiting=Waiting(legs=30))
    assert choose(10_000, pair(site("p", rate=p_rate), d)).kind is kind


def test_who_holds_the_conversation_computes_the_rest_though_answers_run_there() -> None:
    p, d = site("p", held=608), site("d", held=960, waiting=Waiting(legs=4))
    assert choose(1000, pair(p, d)).kind is LOCAL


def test_a_queue_at_decode_sends_the_next_prompt_to_prefill() -> None:
    d = site("d", waiting=Waiting(tokens=1000, legs=1))
    assert choose(1000, pair(site("p"), d)).kind is SPLIT


@pytest.mark.parametrize(("p_rate", "d_rate"), [(0.0, 0.0), (1000.0, 0.0), (0.0, 1000.0)])
def test_without_measured_rates_only_a_few_tokens_are_computed_at_decode(
    p_rate: float, d_rate: float
) -> None:
    p = site("p", rate=p_rate)
    assert choose(1000, pair(p, site("d", rate=d_rate))).kind is SPLIT
    assert choose(1000, pair(p, site("d", rate=d_rate, held=960))).kind is LOCAL
    assert choose(64, pair(p, site("d", rate=d_rate))).kind is LOCAL


def test_the_next_turn_stays_where_most_of_it_is_though_nothing_was_measured_there() -> None:
    sites = pair(site("p"), site("d", held=400, rate=0.0))
    assert choose(500, sites).kind is LOCAL
    assert choose(900, sites).kind is SPLIT


def test_most_of_a_prompt_is_not_computed_twice_to_measure_prefill() -> None:
    assert choose(1000, pair(site("p", rate=0.0), site("d", held=496))).kind is SPLIT
    assert choose(1000, pair(site("p", rate=0.0), site("d", held=512))).kind is LOCAL
    assert choose(1000, pair(site("p", rate=0.0, held=496), site("d", held=512))).kind is SPLIT


def test_of_equal_workers_the_one_that_got_less_lately() -> None:
    sites = Sites(
        (site("p1", share=3), site("p2", share=2)), (site("d1", share=5), site("d2", share=6))
    )
    route = choose(1000, sites, "split")
    assert route.workers == ("p2", "d1")
    assert choose(1000, sites, "local").workers == ("d1",)


def test_a_held_prefix_outweighs_what_others_got() -> None:
    sites = Sites((site("p1", share=9, held=480), site("p2")), (site("d1"),))
    assert choose(1000, sites, "split").first.name == "p1"
    queued = Sites((site("p1", held=480, waiting=Waiting(1000, 1)), site("p2")), (site("d1"),))
    assert choose(1000, queued, "split").first.name == "p2"


def test_a_decode_worker_without_memory_for_it_is_the_last_resort() -> None:
    full, crowded = site("d1", free_blocks=62), site("d2", waiting=Waiting(legs=30))
    assert choose(1000, Sites((site("p"),), (full, crowded))).workers[-1] == "d2"
    assert choose(1000, Sites((site("p"),), (full,))).workers[-1] == "d1"


def test_of_many_workers_the_most_promising_are_paired() -> None:
    prefills = tuple(site(f"p{i:02}", waiting=Waiting(tokens=100 * i)) for i in range(40, 0, -1))
    decodes = tuple(site(f"d{i:02}", held=16 * i, share=100 - i) for i in range(40))
    decodes += tuple(site(f"full{i}", held=960, free_blocks=2) for i in range(9))
    options = routes(1000, Sites(prefills, decodes), "split")
    firsts, lasts = (sorted({route.workers[side] for route in options}) for side in (0, 1))
    assert firsts == [f"p{i:02}" for i in range(1, 9)]
    assert len(options) == 64 and lasts == [f"d{i:02}" for i in range(32, 40)]


def test_nobody_is_an_error() -> None:
    with pytest.raises(ValueError, match="no worker"):
        choose(10, Sites())


names = st.sampled_from(["1", "2", "3"])
rates = st.one_of(st.just(0.0), st.floats(10, 1e5))


@st.composite
def site_lists(draw: st.DrawFn, kind: str, least: int) -> tuple[Site, ...]:
    chosen = draw(st.lists(names, min_size=least, max_size=3, unique=True))
    return tuple(
        site(
            kind + name,
            held=16 * draw(st.integers(0, 100)),
            rate=draw(rates),
            waiting=Waiting(draw(st.integers(0, 5000)), draw(st.integers(0, 40))),
            share=draw(st.integers(0, 128)),
            free_blocks=draw(st.integers(0, 300)),
        )
        for name in chosen
    )


clusters = st.builds(Sites, site_lists("p", 1), site_lists("d", 1), site_lists("b", 0))
prompts = st.integers(1, 4000)
modes = st.sampled_from(["auto", "split", "local"])


def capped(sites: tuple[Site, ...], prompt_tokens: int) -> tuple[Site, ...]:
    """Nobody holds more than the whole blocks before the last token."""
    most = (prompt_tokens - 1) // 16 * 16
    return tuple(replace(one, held_tokens=min(one.held_tokens, most)) for one in sites)


@given(clusters, prompts, modes)
@settings(max_examples=100)
def test_a_route_names_workers_of_their_role(sites: Sites, tokens: int, mode: Mode) -> None:
    route = choose(tokens, sites, mode)
    if route.kind is SPLIT:
        assert route.first in sites.prefills and route.decode in sites.decodes
        assert mode != "local"
    else:
        assert route.first in sites.locals
        assert mode != "split"
    assert route.terms.cost_s >= route.terms.ttft_s > 0


@given(clusters, prompts)
@settings(max_examples=100)
def test_no_forced_way_is_predicted_to_be_cheaper(sites: Sites, tokens: int) -> None:
    auto = choose(tokens, sites)
    allowed = [route for route in routes(tokens, sites) if route.lacks_room == auto.lacks_room]
    cheapest = min(route.terms.cost_s for route in allowed)
    assert auto.terms.cost_s <= max(cheapest * 1.05, cheapest + 0.005)


@given(clusters, prompts, st.data())
@settings(max_examples=100)
def test_more_of_it_held_never_drives_a_prompt_away(
    sites: Sites, tokens: int, data: st.DataObject
) -> None:
    """Neither from local to split by what decode holds, nor back by what prefill does."""
    sites = Sites(*(capped(group, tokens) for group in (sites.prefills, sites.decodes)))
    route = choose(tokens, sites)
    more = 16 * data.draw(st.integers(1, 100))
    (grown,) = capped((replace(route.first, held_tokens=route.first.held_tokens + more),), tokens)

    def with_more(group: tuple[Site, ...]) -> tuple[Site, ...]:
        return tuple(grown if one is route.first else one for one in group)

    again = choose(tokens, Sites(with_more(sites.prefills), with_more(sites.decodes)))
    assert again.kind is route.kind
