"""The report for people: tables, then what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.services.doctor.report import Cluster, Level, Machine, Report

_STYLES = {Level.WRONG: "bold red", Level.NOTE: "yellow"}


def show(console: Console, report: Report) -> None:
    _machine(console, report.machine)
    if report.cluster is not None:
        _cluster(console, report.cluster)
    elif not report.cluster_asked_for:
        console.print(f"\nNo cluster was looked at: {report.no_cluster}", markup=False)
    console.print()
    for found in report.findings:
        style = _STYLES[found.level]
        console.print(
            f"[{style}]{found.level}[/{style}] {escape(found.subject)}: {escape(found.problem)}"
            f"\n      {escape(found.remedy)}",
            highlight=False,
            soft_wrap=True,
        )
    if report.exit_code == 0:
        console.print("[bold green]nothing is wrong[/bold green]")


def _machine(console: Console, machine: Machine) -> None:
    table = _table("this machine", ("", ""))
    for name, version in machine.versions.items():
        table.add_row(name, escape(version) or "[dim]not installed[/dim]")
    shared = machine.shared_memory_bytes
    rows = (
        ("processor", f"{machine.processor} ({', '.join(machine.features) or 'no AVX2'})"),
        ("kernels", f"{machine.kernels}: {machine.kernels_reason}"),
        ("native lease renewal", "built" if machine.native_lease else "not built"),
        ("threads", f"{machine.threads}"),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("/dev/shm", "none" if shared is None else f"{shared / 2**30:.1f} GiB"),
        ("open files", f"{machine.open_files}"),
        ("transport", machine.transport_problem or machine.transport),
        ("clock", machine.clock),
    )
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)


def _cluster(console: Console, cluster: Cluster) -> None:
    redis = cluster.redis
    limit = f"{redis.max_memory_bytes >> 20} MiB" if redis.max_memory_bytes else "no limit"
    table = _table(f"cluster {cluster.name}", ("", ""))
    for name, value in (
        ("redis", f"{redis.version} at {redis.address}, {redis.mode}"),
        ("round trip", f"{redis.round_trip_ms:.2f} ms"),
        ("memory", f"{limit}, {redis.eviction}; saved: {redis.persistence}"),
    ):
        table.add_row(name, escape(value))
    console.print(table)
    if cluster.routers:
        routers = _table("routers", ("name", "address", "lease"))
        for router in cluster.routers:
            routers.add_row(router.name, router.address, f"{router.lease_age_ms} ms ago")
        console.print(routers)
    if cluster.workers:
        about = ("name", "role", "address", "group", "lease", "round trip", "clock", "transport")
        workers = _table("workers", about)
        for worker in cluster.workers:
            asked = bool(worker.transport)
            workers.add_row(
                escape(worker.name),
                worker.role,
                worker.address,
                worker.group[:8],
                f"{worker.lease_age_ms} ms ago",
                f"{worker.round_trip_ms:.2f} ms" if asked else "-",
                f"{worker.clock_offset_ms:+.2f} ms" if asked else "-",
                escape(worker.problem or worker.transport),
            )
        console.print(workers)
    if cluster.pairs:
        names = {worker.incarnation: worker.name for worker in cluster.workers}
        columns = ("prefill", "decode", "carried by", "round trip", "bandwidth", "clock offset")
        pairs = _table("pairs", columns)
        for pair in cluster.pairs:
            works = not pair.problem
            pairs.add_row(
                escape(names[pair.prefill]),
                escape(names[pair.decode]),
                escape(pair.problem or pair.carried_by),
                f"{pair.round_trip_ms:.2f} ms" if works else "-",
                f"{pair.mb_per_s:.0f} MB/s" if works else "-",
                f"{pair.clock_offset_ms:+.2f} ms",
            )
        console.print(pairs)


def _table(title: str, columns: Iterable[str]) -> Table:
    names = tuple(columns)
    table = Table(title=title, title_justify="left", show_header=any(names), box=None)
    for name in names:
        table.add_column(name, overflow="fold")
    return table
