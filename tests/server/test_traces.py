"""Traces of calls, as a collector gets them by OTLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fake_engine import FakeEngine, Plan, serving
from listener import Post, listening

pytestmark = pytest.mark.slow
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector:
    """What it got, as spans of OpenTelemetry's protocol; `status` is what it answers."""

    url: str = ""
    status: int = 200
    bodies: list[bytes] = field(default_factory=list)

    def spans(self) -> list[Any]:
        proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        requests = [proto.ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        scopes = [scope for request in requests for one in request.resource_spans for scope in one.scope_spans]
        return [span for scope in scopes for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    def answer(post: Post) -> tuple[int, dict[str, str]]:
        path, _, body = post
        assert path == "/v1/traces"
        found.bodies.append(body)
        return found.status, {}

    with listening(answer) as found.url:
        yield found


def values(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_call_is_a_span_in_its_clients_trace_and_its_work_are_spans_in_it(collector: Collector) -> None:
    with serving(FakeEngine(plan=Plan(delay_s=0.05)), traces=collector.url) as server:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        answer = server.post({"prompt": "a secret wish", "n": 2, "slo_s": 9}, headers=headers)
        timelines = [one["tilework"] for one in answer.json()["data"]]
    spans = collector.spans()
    assert sorted(one.name for one in spans) == ["call", "diffuse", "diffuse", "image", "image", "queue", "queue"]
    assert {one.trace_id.hex() for one in spans} == {TRACE}
    (call,) = [one for one in spans if one.name == "call"]
    assert call.parent_span_id.hex() == SPAN
    about = values(call)
    assert about["tilework.uid"] == answer.headers["x-request-id"]
    assert (about["tilework.slo_s"], about["tilework.slo_source"], about["tilework.status"]) == (9, "request", "done")
    images = [one for one in spans if one.name == "image"]
    assert {one.parent_span_id for one in images} == {call.span_id}
    for timeline, image in zip(timelines, images, strict=True):
        (work,) = [one for one in spans if one.name == "diffuse" and one.parent_span_id == image.span_id]
        (segment,) = timeline["segments"]
        seconds = (work.end_time_unix_nano - work.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(segment["end_s"] - segment["start_s"], abs=1e-5)
        assert values(work)["tilework.steps"] == segment["steps"]
        assert image.start_time_unix_nano <= work.start_time_unix_nano
        assert work.end_time_unix_nano <= image.end_time_unix_nano + 1000 <= call.end_time_unix_nano + 2000
    assert b"secret" not in b"".join(collector.bodies)


def test_a_failure_is_one_and_another_call_is_another_trace(collector: Collector) -> None:
    with serving(FakeEngine(script=[Plan(fail="out of memory")]), traces=collector.url) as server:
        assert server.post({"prompt": "x"}, headers={"traceparent": "nonsense"}).status_code == 500
        assert server.post({"prompt": "x"}).status_code == 200
    calls = [one for one in collector.spans() if one.name == "call"]
    assert [one.status.code for one in calls] == [2, 0]
    assert "out of memory" in calls[0].status.message
    assert len({one.trace_id for one in calls}) == 2


def test_a_collector_that_fails_is_no_matter(collector: Collector) -> None:
    collector.status = 400
    with serving(FakeEngine(), traces=collector.url) as server:
        assert server.post({"prompt": "x"}).status_code == 200
    assert collector.bodies
