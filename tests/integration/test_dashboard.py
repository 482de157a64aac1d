"""Who may see the dashboard, and that its numbers are those of the metrics."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from tests.stack import Stack, metrics_at, until

KEY = "open-sesame"
CLUSTER = "/dashboard/api/cluster?requests=200"


def test_with_an_admin_port_it_is_there_alone_and_needs_no_key(split: Stack) -> None:
    with split.behind("beside", api_key=(KEY,), admin_port=0) as beside:
        for path in ("/dashboard", CLUSTER):
            assert httpx.get(f"{beside.admin}{path}").status_code == 200
            given = {"authorization": f"Bearer {KEY}"}
            assert httpx.get(f"{beside.url}{path}", headers=given).status_code == 404
        page = httpx.get(f"{beside.admin}{CLUSTER}").json()
        assert f":{page['port']}" in beside.url, "where one asks is not where one looks"


def test_what_it_lists_adds_up_to_what_metrics_count(split: Stack) -> None:
    with split.behind("counted") as router, httpx.Client(base_url=router.url) as http:

        def shown() -> dict[str, Any]:
            page: dict[str, Any] = http.get(CLUSTER).json()
            return page

        over, seen = threading.Event(), []

        def watch() -> None:
            while not over.is_set():
                seen.append(shown())

        with ThreadPoolExecutor(8) as pool:
            watching = pool.submit(watch)
            asked = [
                pool.submit(router.complete, list(range(5, 25 + number)), max_tokens=2 + number % 9)
                for number in range(40)
            ]
            answers = [each.result() for each in asked]
            over.set()
            watching.result()
        until(lambda: shown()["totals"]["in_flight"] == 0, 5, "all have ended")
        listed, counted = shown()["requests"], metrics_at(f"{router.url}/metrics")
        assert {each["outcome"] for each in listed} == {"ok"}
        assert len(listed) == len(answers) == counted_requests(counted)
        for field, kind in (("prompt_tokens", "prompt"), ("output_tokens", "completion")):
            total = sum(each[field] for each in listed)
            assert total == counted[f'kvrelay_request_tokens_total{{kind="{kind}"}}']
            usage = f"{kind}_tokens"
            assert total == sum(answer["usage"][usage] for answer in answers)
        minute = shown()["totals"]
        assert minute["first_token"]["count"] == len(answers)
        gaps = sum(each["output_tokens"] - 1 for each in listed)
        assert minute["gap"]["count"] == gaps
        assert any(0 < page["totals"]["in_flight"] <= 7 for page in seen)
        assert sum(pair["prompts"] for pair in shown()["pairs"]) > 0


def counted_requests(page: dict[str, float]) -> int:
    return round(sum(v for name, v in page.items() if name.startswith("kvrelay_requests_total")))
