"""The generated client has no types; this is the one place that knows."""

from __future__ import annotations

import grpc

from kvrelay.shared.rpc.gen import relay_pb2_grpc


def worker_stub(channel: grpc.aio.Channel) -> relay_pb2_grpc.WorkerStub:
    return relay_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
