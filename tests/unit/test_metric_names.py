"""Dashboards, rules and pages name metrics: each must be there, and each must be described."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvrelay.services.chaos.watch import COUNTED, HELD
from kvrelay.shared.telemetry.chaos import count_chaos
from kvrelay.shared.telemetry.metrics import (
    RouterGauges,
    RouterMetrics,
    WorkerGauges,
    WorkerMetrics,
)

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
RULES = [ROOT / "deploy/prometheus" / name for name in ("rules.yml", "alerts.yml")]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NAMED = re.compile(r"\b(?:kvrelay|vllm|process)[:_][a-z0-9_:]+")
"""As a query writes it: a sample's name, or a recorded rule's."""
INFO = {name: "x" for name in ("role", "name", "model", "dtype", "version")}
NO_METRICS = {"kvrelay_timing"}
"""Words of the API that look like names of metrics."""


def registries() -> dict[str, CollectorRegistry]:
    router = RouterMetrics(lambda: RouterGauges(0, {}), "tiny").registry
    worker = WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), INFO, "tiny").registry
    count_chaos(worker)
    return {"router": router, "worker": worker}


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, str, str]]:
    """Of each metric by the name it is asked for: kind, labels, text."""
    found = {}
    for family in registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        kind = "gauge" if family.type == "info" else family.type
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[family.name + suffix] = (kind, ", ".join(sorted(labels)), family.documentation)
    return found


METRICS = {name: told for each in registries().values() for name, told in exported(each).items()}
SAMPLES = {
    name + suffix
    for name, (kind, _, _) in METRICS.items()
    for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
}


def rules(path: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load(path.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDED = {rule["record"] for path in RULES for rule in rules(path) if "record" in rule}


def panels(board: Path) -> list[dict[str, Any]]:
    return list(json.loads(board.read_text())["panels"])


def queries() -> dict[str, str]:
    """Of all dashboards and rules, by where they stand."""
    found = {}
    for board in BOARDS:
        for panel in panels(board):
            for target in panel.get("targets", ()):
                found[f"{board.name}: {panel['title']} {target['refId']}"] = target["expr"]
    for path in RULES:
        for rule in rules(path):
            found[f"{path.name}: {rule.get('record') or rule['alert']}"] = rule["expr"]
    return found


@pytest.mark.parametrize("where", queries())
def test_a_query_asks_for_what_there_is(where: str) -> None:
    query = queries()[where]
    names = set(NAMED.findall(query))
    assert names or query.startswith("up"), query
    assert names - SAMPLES - RECORDED == set()
    for name, matchers in re.findall(r"\b(kvrelay_\w+)\{([^}]*)\}", query):
        metric = re.sub(r"_(bucket|sum|count)$", "", name) if name not in METRICS else name
        labels = set(re.findall(r"(\w+)\s*[=!]", matchers))
        assert labels <= set(METRICS[metric][1].split(", ")), query


def test_pages_name_only_what_there_is() -> None:
    for page in PAGES:
        named = set(NAMED.findall(page.read_text())) - NO_METRICS
        assert named - SAMPLES - RECORDED - set(METRICS) == set(), page.name


def test_every_metric_is_described_as_it_describes_itself() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| (.*?) ?\| (.*) \|$", text, re.MULTILINE)
    described = {name: (kind, labels, said) for name, kind, labels, said in rows}
    own = {k: v for k, v in METRICS.items() if k != "kvrelay_chaos_injected_total"}
    assert described == own
    assert "kvrelay_chaos_injected_total" in text


def test_what_the_soak_looks_at_is_there() -> None:
    assert {name.partition("{")[0] for name in (*HELD, *COUNTED)} <= set(METRICS)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_a_dashboard_can_be_imported_and_read(board: Path) -> None:
    told = json.loads(board.read_text())
    assert told["uid"].startswith("kvrelay-") and told["title"] and told["description"]
    (source,) = [each for each in told["templating"]["list"] if each["type"] == "datasource"]
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    ids = [panel["id"] for panel in told["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in told["panels"]:
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, f"{panel['title']} lies on another"
        taken |= cells


def test_every_alert_says_what_is_wrong_and_what_to_do_and_is_tested() -> None:
    tested = yaml.safe_load((ROOT / "deploy/prometheus/tests.yml").read_text())["tests"]
    fired = {
        each["alertname"]
        for test in tested
        for each in test.get("alert_rule_test", ())
        if each["exp_alerts"]
    }
    alerts = [rule for rule in rules(RULES[1])]
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "for" in rule, "one look is no alert"
    assert {rule["alert"] for rule in alerts} == fired
