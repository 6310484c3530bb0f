"""Traces of calls for OpenTelemetry: spans of each call, made when it has ended."""

from __future__ import annotations

import re
from typing import Any

import tilework
from tilework.distribution import install_command
from tilework.server.calls.records import CallRecord
from tilework.server.config import ConfigError
from tilework.server.schema.answers import ImageStatus

TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
"""Header of a call that is part of a trace (W3C Trace Context, section 3.2)."""
_PATH = "/v1/traces"
_S_TO_NS = 10**9


class Traces:
    """Sends spans to a collector at `url`, by OTLP over HTTP, in batches on a thread; what it does not take is lost.

    A call is a span. In it, each image is a span, which has a span for its wait in the queue and one for each piece of
    work. They are made from the call's record, so nothing is traced while the call is under way. A call whose client
    sent `traceparent` is part of that trace.

    Raises:
        ConfigError: the packages of the extra `otel` are missing.
    """

    def __init__(self, url: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise ConfigError(f"traces is {url!r}, which needs packages: {install_command('otel')}") from error
        about = Resource.create({"service.name": "tilework", "service.version": tilework.__version__})
        self._provider = TracerProvider(resource=about)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url.rstrip("/") + _PATH)))
        self._tracer = self._provider.get_tracer("tilework.server")
        self._propagator = TraceContextTextMapPropagator()

    def on_record(self, record: CallRecord) -> None:
        """Trace a call that has ended."""
        status = record.status()
        given = {} if record.ask.traceparent is None else {"traceparent": record.ask.traceparent}
        latencies_s = [one.timeline.latency_s for one in status.images if one.timeline is not None]
        attributes = {
            "tilework.uid": status.uid,
            "tilework.model": record.ask.model,
            "tilework.tenant": record.tenant,
            "tilework.priority": status.priority,
            "tilework.size": status.size,
            "tilework.status": status.status,
            "tilework.slo_s": status.slo_s,
            "tilework.slo_source": status.slo_source,
        }
        parent = self._propagator.extract(given)
        latency_s = max(latencies_s, default=0.0)
        reason = None if status.error is None else status.error.message
        call = self._span("call", record.arrived_s, latency_s, attributes, parent, reason)
        for image in status.images:
            self._image(image, record.arrived_s, call)

    def close(self) -> None:
        """Send what is left; waits for the collector for a limited time."""
        self._provider.shutdown()

    def _image(self, image: ImageStatus, arrived_s: float, call: Any) -> None:
        timeline = image.timeline
        if timeline is None:
            return
        about: dict[str, Any] = {
            "tilework.uid": image.uid,
            "tilework.on_time": timeline.on_time,
            "tilework.exact": timeline.exact,
        }
        parent = self._inside(call)
        whole = self._inside(self._span("image", arrived_s, timeline.latency_s, about, parent))
        self._span("queue", arrived_s, timeline.queue_s or 0.0, {}, whole)
        for one in timeline.segments:
            attributes = {
                "tilework.devices": one.devices,
                "tilework.steps": one.steps,
                "tilework.batch": one.batch,
                "tilework.load_s": one.load_s,
            }
            self._span(one.stage, arrived_s + one.start_s, one.end_s - one.start_s, attributes, whole)

    def _span(
        self,
        name: str,
        start_s: float,
        seconds: float,
        attributes: dict[str, Any],
        parent: Any,
        failure: str | None = None,
    ) -> Any:
        """Make a span that has ended, in the context `parent`; the `failure` is its error."""
        from opentelemetry.trace import Status, StatusCode

        start_ns = round(start_s * _S_TO_NS)
        known = {key: value for key, value in attributes.items() if value is not None}
        span = self._tracer.start_span(name, context=parent, start_time=start_ns, attributes=known)
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(end_time=start_ns + round(seconds * _S_TO_NS))
        return span

    def _inside(self, span: Any) -> Any:
        """Return the context of spans inside this one."""
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span)
