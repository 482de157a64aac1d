"""How the result of an audit looks: a table for people, an object for machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvrelay.services.audit.app import Report

MOST_ROWS: Final = 50


def as_table(report: Report, console: Console) -> None:
    for who, why in report.unasked.items():
        said = why if why.startswith(who) else f"{who}: {why}"
        console.print(f"not asked: {said}", markup=False, highlight=False, soft_wrap=True)
    if report.findings:
        console.print(_table(report))
        if (more := len(report.findings) - MOST_ROWS) > 0:
            console.print(f"... and {more} more (--json has all)")
    if report.pictures:
        console.print(f"{_looked_at(report)}: {_result(report)}", markup=False, highlight=False)


def _table(report: Report) -> Table:
    table = Table("kind", "where", "what", box=None, pad_edge=False, header_style="bold")
    for finding in report.findings[:MOST_ROWS]:
        table.add_row(finding.kind, finding.where, finding.text)
    return table


def _looked_at(report: Report) -> str:
    return ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in _counts(report).items() if count
    )


def _result(report: Report) -> str:
    count = len(report.findings)
    found = "everything has an owner" if not count else f"{count} without an owner"
    return f"{found}, of those who answered" if report.unasked else found


def _counts(report: Report) -> dict[str, int]:
    last = report.last
    answers = [worker.answer for worker in last.workers if worker.answer is not None]
    return {
        "workers": len(answers),
        "routers": sum(router.answer is not None for router in last.routers),
        "legs": sum(len(answer.legs) for answer in answers),
        "blocks_in_use": sum(leg.blocks for answer in answers for leg in answer.legs),
        "ledger_records": len(last.ledger),
        "blocks_in_the_directory": sum(len(worker.directory or ()) for worker in last.workers),
    }


def as_json(report: Report, console: Console) -> None:
    result = {
        "status": report.status,
        "findings": [
            {
                "kind": finding.kind,
                "where": finding.where,
                "what": finding.text,
                "blocks": sorted(digest.hex() for digest in finding.digests),
            }
            for finding in report.findings
        ],
        "unasked": [{"who": who, "why": why} for who, why in report.unasked.items()],
        "looked_at": _counts(report),
        "pictures": report.pictures,
    }
    console.out(json.dumps(result), highlight=False)
