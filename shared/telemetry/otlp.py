"""Sends finished spans by OTLP from a thread of its own: bounded, quiet, and quick to end.

Opened only when the standard variables ask for it, because the SDK is slow to import.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from kvrelay import __version__
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.telemetry.log import mask_secrets

QUEUE_SPANS: Final = 4_096
"""Beyond this the oldest are dropped."""
BATCH_SPANS: Final = 512
EXPORT_EVERY_MS: Final = 1_000

_log = logging.getLogger(__name__)


class SpanSink:
    """A bounded queue of spans and the thread that exports them. Raises `ConfigError`."""

    def __init__(self, service: str, instance: str, environ: Mapping[str, str]) -> None:
        self._exporter = _Reporting(_exporter(_protocol(environ)), _endpoint(environ))
        # The library says again for each batch what `_Reporting` says once.
        library = logging.getLogger("opentelemetry")
        library.handlers, library.propagate = [logging.NullHandler()], False
        defaults = Resource({"service.name": service, "service.instance.id": instance})
        resource = defaults.merge(OTELResourceDetector().detect())
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUE_SPANS,
            schedule_delay_millis=EXPORT_EVERY_MS,
            max_export_batch_size=BATCH_SPANS,
        )
        # Not at exit by itself: that may wait for half a minute.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self.tracer: Tracer = provider.get_tracer("kvrelay", __version__)
        """Spans that end are queued; that never blocks."""

    def close(self, timeout_s: float) -> None:
        """Send what is queued; whatever has not gone after `timeout_s` is dropped."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s * 0.75)
        if closing.is_alive():
            self._exporter.shutdown()  # ends the wait between the exporter's own retries
            closing.join(timeout_s * 0.25)


class _Reporting(SpanExporter):
    """Logs the first failure of a row, and the success that ends it."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = mask_secrets(endpoint)
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed != self._failing:
            self._failing = failed
            if failed:
                _log.warning("no traces: %s takes none; dropping spans meanwhile", self._endpoint)
            else:
                _log.info("%s takes traces again", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for traces by OTLP."""
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    other = environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() != "otlp"
    return bool(_endpoint(environ)) and not disabled and not other


def _endpoint(environ: Mapping[str, str]) -> str:
    general = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", general).strip()


def _protocol(environ: Mapping[str, str]) -> str:
    """As configured, else by the port that OTLP over gRPC is registered for."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = environ.get(name, "").strip()
        if value in ("grpc", "http/protobuf"):
            return value
        if value:
            raise ConfigError(f"{name}: must be grpc or http/protobuf, found {value!r}")
    return "grpc" if _endpoint(environ).rstrip("/").endswith(":4317") else "http/protobuf"


def _exporter(protocol: str) -> SpanExporter:
    """The library reads endpoint, headers, certificates and timeout from the environment itself."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter()
