"""The timeline of an image, in seconds from its arrival: what a client reads under `tilework`."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.cache import CacheChoice, CacheUse
from tilework.core.time import s_from_ns
from tilework.runtime.ticket import Outcome, Ticket, WorkSegment
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.schema.answers import CacheModel, RequestTimeline, SegmentModel
from tilework.server.schema.provenance import Provenance


def request_timeline(
    call: ImageCall, index: int, ticket: Ticket, outcome: Outcome, provenance: Provenance | None = None
) -> RequestTimeline:
    """Return the timeline of an image that has ended; it shows its `provenance` if the image is exact."""
    request = ticket.request
    queue_ns = ticket.queue_ns
    deadline_ns = request.deadline_ns
    return RequestTimeline(
        uid=outcome.uid,
        seed=call.specs[index].seed,
        status=outcome.status.value,
        eta_s=_seconds(ticket.eta_ns - request.arrival_ns),
        eta_p90_s=_seconds(ticket.eta_p90_ns - request.arrival_ns),
        latency_s=_seconds(outcome.finished_ns - request.arrival_ns),
        queue_s=None if queue_ns is None else _seconds(queue_ns),
        slo_s=call.slo_s,
        slo_source=call.slo_source,
        is_promised=call.is_promised,
        on_time=None if deadline_ns is None else outcome.finished_ns <= deadline_ns,
        exact=is_exact(ticket, outcome),
        vae_tiling=call.vae_tiling,
        warnings=list(call.warnings),
        cache=_cache(request.cache, outcome.segments),
        segments=[_segment(segment, request.arrival_ns) for segment in outcome.segments],
        provenance=provenance if provenance is not None and provenance.exact else None,
    )


def is_exact(ticket: Ticket, outcome: Outcome) -> bool:
    """Return whether an image was to be exact, and each work of it ran on one device, alone and whole."""
    return ticket.request.exact and all(segment.is_exact for segment in outcome.segments)


def stage_durations(timeline: RequestTimeline) -> dict[str, float]:
    """Return seconds by stage; a stage's pieces are added up."""
    durations_s: dict[str, float] = {}
    for segment in timeline.segments:
        before_s = durations_s.get(segment.stage, 0.0)
        durations_s[segment.stage] = round(before_s + segment.end_s - segment.start_s, 6)
    return durations_s


def _cache(choice: CacheChoice | None, segments: Sequence[WorkSegment]) -> CacheModel | None:
    if choice is None:
        return None
    use = sum((one.cache_use for one in segments if one.cache_use is not None), CacheUse())
    return CacheModel(
        kind=choice.kind,
        threshold=choice.threshold,
        interval=choice.interval,
        computed=use.computed,
        skipped=use.skipped,
        saving=round(use.saving, 6),
        off=use.off or None,
    )


def _segment(segment: WorkSegment, arrival_ns: int) -> SegmentModel:
    return SegmentModel(
        stage=segment.stage,
        devices=list(segment.devices),
        steps=segment.num_steps,
        start_s=_seconds(segment.start_ns - arrival_ns),
        end_s=_seconds(segment.end_ns - arrival_ns),
        sliced=segment.sliced,
        batch=segment.batch,
        load_s=_seconds(segment.load_ns),
    )


def _seconds(duration_ns: int) -> float:
    return round(s_from_ns(duration_ns), 6)
