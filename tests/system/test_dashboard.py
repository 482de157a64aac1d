"""`/dashboard` in a real browser, over a real cluster under load.

With DASHBOARD_PICTURES=1 the pictures in `docs/pictures` are made anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Final

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.stack import metrics, metrics_at, until
from tests.system.cluster import Cluster
from tests.system.load import PROMPTS, Load

pytestmark = pytest.mark.system
CHROMIUM: Final = "/usr/bin/chromium"
PICTURES: Final = Path(__file__).parents[2] / "docs" / "pictures"
FIXED: Final = "header > *, .stat, .stat output, .card, .head, thead th, #facts dd"
"""What has its place whatever the values are."""
IN_FLIGHT: Final = "kvrelay_requests_in_flight"
COLUMNS: Final = ("state", "received", "id", "route", "prompt", "cached", "output", "first", "all")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        # As root there is no sandbox; the page is our own.
        yield driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Browser, cluster: Cluster) -> Iterator[Page]:
    """Open at the dashboard. Whatever it complained about or asked elsewhere fails the test."""
    with browser.new_context(viewport={"width": 1440, "height": 1000}) as context:
        page = context.new_page()
        wrong: list[str] = []
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((cluster.url, "data:")) else wrong.append(asked.url)
            ),
        )
        page.goto(f"{cluster.url}/dashboard")
        expect(page.locator("#ready")).to_have_text("Ready")
        yield page
        offline = "net::ERR_INTERNET_DISCONNECTED"
        assert [each for each in wrong if offline not in each] == []


def rows(page: Page) -> list[dict[str, str]]:
    texts: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('#requests tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return [dict(zip(COLUMNS, each, strict=True)) for each in texts]


def kept(cluster: Cluster) -> set[str]:
    """Ids of all requests until now: the page may not have drawn them yet."""
    with urllib.request.urlopen(f"{cluster.url}/dashboard/api/requests?limit=200") as answer:
        return {line["id"] for line in json.load(answer)["requests"]}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def ms(text: str) -> float:
    value, unit = text.replace(",", "").split()
    return float(value) * {"µs": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def test_it_shows_what_metrics_count(page: Page, cluster: Cluster) -> None:
    def counted() -> dict[str, float]:
        return metrics_at(f"{cluster.url}/metrics")

    def agree() -> bool:
        shown, there = number(page.inner_text("#in-flight")), counted()[IN_FLIGHT]
        return shown == there > 0

    before, known = counted(), kept(cluster)
    with Load(cluster.url, cluster.model) as load:
        until(agree, 20, "as many in flight as counted")
        load.wait_answers(6)
    assert load.wrong() == {}
    asked = load.done + len(PROMPTS)  # each was asked once before
    until(
        lambda: (
            len([r for r in rows(page) if r["id"] not in known and r["state"] == "finished"])
            == asked
        ),
        10,
        "all requests are in the list, finished",
    )
    expect(page.locator("#in-flight")).to_have_text("0")
    after, new = counted(), [row for row in rows(page) if row["id"] not in known]
    for column, kind in (("prompt", "prompt"), ("cached", "cached"), ("output", "completion")):
        sample = f'kvrelay_request_tokens_total{{kind="{kind}"}}'
        assert sum(number(row[column]) for row in new) == after[sample] - before[sample], kind
    ttft = "kvrelay_time_to_first_token_seconds_sum"
    shown_s = sum(ms(row["first"]) for row in new) / 1e3
    assert shown_s == pytest.approx(after[ttft] - before[ttft], rel=0.01)
    assert ms(page.inner_text("#gap .p99")) >= ms(page.inner_text("#gap .p50"))


def test_pools_are_those_of_the_workers(page: Page, cluster: Cluster) -> None:
    def pools() -> dict[str, list[int]]:
        found: list[list[str]] = page.evaluate(
            "[...document.querySelectorAll('#workers tbody tr')]"
            ".map((row) => [0, 4, 5, 6].map((at) => row.cells[at].textContent))"
        )
        return {name: [*map(number, counts)] for name, *counts in found}

    def counted() -> dict[str, list[int]]:
        pages = {worker.name: metrics(worker) for worker in cluster.workers}
        kinds = ("in_use", "cached_idle", "free")
        return {
            name: [round(page[f'kvrelay_pool_blocks{{state="{kind}"}}']) for kind in kinds]
            for name, page in pages.items()
        }

    with Load(cluster.url, cluster.model) as load:
        load.wait_answers(3)
    until(lambda: pools() == counted(), 15, f"{pools()} is {counted()}")
    relayed = page.evaluate(
        "[...document.querySelectorAll('#pairs tbody tr')].map((row) => row.cells[4].textContent)"
    )
    assert sum(map(number, relayed)) > 0
    expect(page.get_by_role("table", name="Workers").get_by_role("row")).to_have_count(5)


def test_a_request_is_chosen_by_keyboard_and_its_timeline_read(
    page: Page, cluster: Cluster
) -> None:
    with Load(cluster.url, cluster.model) as load:
        load.wait_answers(3)
    page.reload()
    expect(page.get_by_role("grid", name="Requests")).to_be_visible()
    page.wait_for_function("document.querySelectorAll('#requests tbody tr').length > 3")
    for _ in range(6):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "TR":
            break
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    focused = page.evaluate("document.activeElement.dataset.key")
    assert focused == rows(page)[1]["id"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#detail-id")).to_have_text(focused)
    expect(page.get_by_role("row", selected=True)).to_have_count(1)

    bars = page.locator("#bars .bar")
    expect(bars.first).to_be_visible()
    spans = page.get_by_role("table", name="Spans of this request").locator("tbody tr")
    assert bars.count() == spans.count() > 2
    assert page.locator("#bars .lane").all_inner_texts()[0] == "router"
    assert page.locator("#why").inner_text() != ""
    first = rows(page)[1]["first"]
    expect(page.locator("#bars .flag")).to_have_text(f"first token {first}")
    page.get_by_role("button", name="Table").click()
    expect(page.locator("#bars")).to_be_hidden()
    expect(spans.first).to_be_visible()


def test_nothing_moves_while_it_changes(page: Page, cluster: Cluster) -> None:
    def places() -> list[list[float]]:
        found: list[list[float]] = page.evaluate(
            f"[...document.querySelectorAll('{FIXED}')].map((each) => {{"
            "const box = each.getBoundingClientRect();"
            "return [box.left, box.top].map(Math.round); })"
        )
        return found

    with Load(cluster.url, cluster.model) as load:
        load.wait_answers(3)
        page.locator("#requests tbody tr", has_text="finished").first.click()
        page.wait_for_selector("#bars .bar")
        page.wait_for_function("document.querySelectorAll('#pairs tbody tr').length > 0")
        before, shown = places(), page.inner_text("main")
        load.wait_answers(12)
        until(lambda: page.inner_text("main") != shown, 10, "other values")
        assert places() == before
    assert len(before) > 40


def test_a_router_that_is_gone_is_told_and_waited_for(page: Page) -> None:
    page.context.set_offline(True)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The router does not answer")
    expect(page.locator("#ready")).to_have_text("No answer")
    page.context.set_offline(False)
    expect(alert).to_be_hidden(timeout=15_000)
    expect(page.locator("#ready")).to_have_text("Ready")


def test_a_thousand_rows_asked_for_are_a_hundred_shown(page: Page, cluster: Cluster) -> None:
    with Load(cluster.url, cluster.model, tokens=1) as load:
        load.wait_answers(110)
    until(lambda: len(rows(page)) == 100, 10, "a full list")


def test_top_shows_the_same(page: Page, cluster: Cluster) -> None:
    with Load(cluster.url, cluster.model) as load:
        load.wait_answers(3)
    command = [sys.executable, "-m", "kvrelay.services.cli", "top", "--router", cluster.url]
    done = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    newest = rows(page)[0]["id"]
    assert newest in done.stdout
    assert all(worker.name in done.stdout for worker in cluster.workers)
    assert re.search(r"in flight 0\b", done.stdout)


@pytest.mark.skipif(not os.environ.get("DASHBOARD_PICTURES"), reason="pictures on request")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures(page: Page, cluster: Cluster, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    with Load(cluster.url, cluster.model, tokens=400) as load:
        load.wait_answers(9)
        page.locator("#requests tbody tr", has_text="finished").first.click()
        expect(page.locator("#bars .bar").first).to_be_visible()
        PICTURES.mkdir(parents=True, exist_ok=True)
        whole = Image.open(BytesIO(page.screenshot())).convert("RGB")
        picture = whole.quantize(256, Image.Quantize.MAXCOVERAGE)  # rare colours stay
        picture.save(PICTURES / f"dashboard-{scheme}.png", optimize=True)
