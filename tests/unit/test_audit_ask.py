"""How an audit asks: workers, routers and the command line itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from fastapi import FastAPI
from tests.unit.test_links import Commanded, serving
from typer.testing import CliRunner

from kvrelay.services import cli
from kvrelay.services.audit.app import Report, _routers, router_url
from kvrelay.services.audit.ask import Absent, Silent, ask_router, ask_worker
from kvrelay.services.audit.config import AuditConfig
from kvrelay.services.router.admin import admin_route, legs_page
from kvrelay.services.router.http import Server
from kvrelay.services.sources import ALL_SETTINGS
from kvrelay.services.valkey import free_port
from kvrelay.shared import config as settings
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, RouterRecord, WorkerRecord
from kvrelay.shared.types import Incarnation, Role
from kvrelay.shared.worker.servicer import WorkerServicer

pytestmark = pytest.mark.leaks_allowed  # gRPC's threads


def record(address: str) -> WorkerRecord:
    return WorkerRecord(
        incarnation=Incarnation("w"),
        role=Role.DECODE,
        name="decode-0",
        model="m",
        grpc_address=address,
        metrics_address="",
        transfer_scheme="tcp",
        transfer_address=b"",
        fingerprint=dict.fromkeys(FINGERPRINT_FIELDS, "x"),
        block_size=16,
        pool_blocks=64,
        max_model_len=1024,
        max_num_seqs=8,
    )


class Wedged(Commanded):
    async def audit(self) -> pb.AuditReply:
        raise TimeoutError


class Renamed(Commanded):
    async def audit(self) -> pb.AuditReply:
        return pb.AuditReply(incarnation="another")


async def problem_at(worker: relay_pb2_grpc.WorkerServicer) -> Absent | Silent:
    async with serving(worker) as address:
        with pytest.raises((Absent, Silent)) as raised:
            await ask_worker(record(address))
    assert isinstance(raised.value, Absent | Silent)
    return raised.value


async def test_a_worker_whose_engine_stands_still_gives_no_answer() -> None:
    problem = await problem_at(WorkerServicer(Wedged(), lambda budget_s: None))
    assert isinstance(problem, Silent)
    assert str(problem) == "the engine made no turn within 2 s"


async def test_a_worker_of_an_older_version_gives_no_answer() -> None:
    problem = await problem_at(relay_pb2_grpc.WorkerServicer())  # type: ignore[no-untyped-call]
    assert isinstance(problem, Silent) and str(problem).endswith("knows no audit")


async def test_another_start_of_a_worker_is_not_the_one_that_was_meant() -> None:
    problem = await problem_at(WorkerServicer(Renamed(), lambda budget_s: None))
    assert isinstance(problem, Absent) and str(problem).endswith("there is another now")


async def test_where_nobody_listens_there_is_no_worker_and_no_router() -> None:
    grpc.aio.init_grpc_aio()
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(Absent, match=f"^nobody listens at {address}$"):
        await ask_worker(record(address))
    with pytest.raises(Absent, match=f"^nobody listens at http://{address}$"):
        await ask_router(f"http://{address}", [RouterRecord(Incarnation("r"), "r", address, "t")])


@asynccontextmanager
async def router() -> AsyncIterator[str]:
    """Its address; its token is `right`."""
    app = FastAPI()
    app.router.routes.append(admin_route("right", lambda: legs_page("own", [], 2, 1)))
    server, port = Server(app), free_port()
    server.config.port, server.config.host = port, "127.0.0.1"
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.001)
    yield f"127.0.0.1:{port}"
    server.stop()
    await task


async def test_a_router_answers_who_has_its_token() -> None:
    async with router() as address:
        wrong, right = (
            RouterRecord(Incarnation(token), token, address, token) for token in ("wrong", "right")
        )
        page = await ask_router(f"http://{address}", [wrong, right])
        assert (page.record, page.router) == (right, "own")
        assert (page.answer.requests_in_flight, page.answer.queued, page.answer.legs) == (2, 1, ())
        with pytest.raises(Silent, match=r"is no router that this cluster's Redis knows$"):
            await ask_router(f"http://{address}", [wrong])
        async with httpx.AsyncClient() as client:
            refused = await client.get(f"http://{address}/admin/legs")
        assert refused.status_code == 401 and "own" not in refused.text


async def test_a_token_goes_to_no_address_but_its_routers() -> None:
    async with router() as address:
        elsewhere = RouterRecord(Incarnation("b"), "r", f"127.0.0.1:{free_port()}", "right")
        hidden = RouterRecord(Incarnation("a"), "r", "", "right")
        silent: dict[str, str] = {}
        found = await _routers((hidden,), (f"http://{address}",), silent)
        assert [facts.names for facts in found] == [{"a", "own"}] and silent == {}
        found = await _routers((elsewhere, hidden), (f"http://{address}",), silent)
        assert [facts.names for facts in found] == [{"a", "own"}, {"b"}]
        assert found[1].absent.startswith("nobody listens at")


@pytest.mark.parametrize("text", ["ftp://a", "http://", "a/b", "http://a:1/v1"])
def test_an_address_that_is_none_is_named(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--router is .*: must be like http://10\.0\.0\.9:8000$"
    ):
        router_url(text)


def test_an_address_may_stand_without_its_scheme() -> None:
    assert router_url("10.0.0.9:8000") == "http://10.0.0.9:8000"
    assert router_url("https://edge/") == "https://edge"


def test_the_routers_table_of_a_file_is_no_address(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text('redis = "redis://10.0.0.5:1/0"\n[router]\nport = 8123\n')
    sources = settings.read_sources({"config": str(file)}, {})
    settings.check_known(sources, ALL_SETTINGS)
    config = settings.resolve(AuditConfig, sources).config
    assert (config.routers, config.redis_url) == ((), "redis://10.0.0.5:1/0")


def test_a_redis_that_does_not_answer_is_one_line_and_exit_2() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    plain = CliRunner().invoke(cli.app, ["audit", "--redis", url], catch_exceptions=False)
    assert plain.exit_code == 2
    [line] = plain.output.splitlines()
    assert line.startswith("not asked: Redis at 127.0.0.1:") and "secret" not in line
    as_json = CliRunner().invoke(cli.app, ["audit", "--redis", url, "--json"])
    assert as_json.exit_code == 2
    result = json.loads(as_json.output)
    assert (result["status"], result["findings"]) == (2, [])
    assert [each["who"] for each in result["unasked"]] == ["Redis"]


def test_who_was_not_asked_weighs_more_than_what_was_found() -> None:
    assert Report((), {}).status == 0
    assert Report((), {"decode-0": "it does not answer"}).status == 2
