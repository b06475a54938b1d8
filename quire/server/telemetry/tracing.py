"""OpenTelemetry spans, one per request, for those who ask for them with otlp_endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError


class Tracing:
    """Makes spans; without a tracer it makes none and costs nothing."""

    def __init__(self, tracer: Any = None, provider: Any = None) -> None:
        self._tracer = tracer
        self._provider = provider

    @classmethod
    def to(cls, endpoint: str | None) -> Tracing:
        """Spans that are sent over OTLP/HTTP."""
        if endpoint is None:
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError("otlp_endpoint needs OpenTelemetry: pip install opentelemetry-sdk "
                              "opentelemetry-exporter-otlp-proto-http", field="otlp_endpoint") from error
        provider = TracerProvider(resource=Resource.create({"service.name": "quire"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider.get_tracer("quire"), provider)

    def start(self, headers: Mapping[str, str]) -> Any:
        """A span below the caller's, where its `traceparent` header names one; None where there are no spans."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(headers))
        return self._tracer.start_span("request", context=parent, kind=SpanKind.SERVER)

    @staticmethod
    def end(span: Any, name: str, status: int, attributes: Mapping[str, Any]) -> None:
        """`name` is the route, which is known only now."""
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        span.update_name(name)
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
