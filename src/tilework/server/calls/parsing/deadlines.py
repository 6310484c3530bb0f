"""The deadline of a call, in the field and the unit that its client chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from tilework.server.calls.errors import invalid
from tilework.server.default_slo import DefaultSlo
from tilework.server.schema.image_request import ImageRequest
from tilework.server.text import parse_time, time_text

_ROUND_TRIP_S = 0.5
_UNITS = {"slo_s": (1, "seconds"), "slo_ms": (1000, "milliseconds")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A deadline `slo_s` seconds after arrival; `field` and `value` are as the client sent them.

    `source` says who has set it: the "request", or the "tenant", "class", "model" or "server" for requests without one.
    """

    slo_s: float
    field: str
    value: float | str
    source: str = "request"

    def moved(self, slo_s: float) -> float | str:
        """Return the value of this field for a deadline `slo_s` after the same arrival, never an earlier one.

        A date and time is later by the time that the client takes to ask again.
        """
        if self.field in _UNITS:
            return round(slo_s * _UNITS[self.field][0], 6)
        time = parse_time(str(self.value))
        assert time is not None
        moved = time + timedelta(seconds=slo_s - self.slo_s + _ROUND_TRIP_S, microseconds=999)  # Cut to milliseconds.
        return time_text(moved.timestamp())


def asked_deadline(
    *, slo_s: float | None, slo_ms: float | None, deadline: str | None, now: datetime, most_s: float
) -> Deadline | None:
    """Return the deadline of a call that arrives `now`, given in one of three fields, or None.

    Raises:
        InvalidValue: it is given twice, is no time, has passed, or is more than `most_s` seconds away.
    """
    fields = {"deadline": deadline, "slo_s": slo_s, "slo_ms": slo_ms}
    given = [(name, value) for name, value in fields.items() if value is not None]
    if not given:
        return None
    (field, value), *others = given
    if others:
        raise invalid(field, value, f"{others[0][0]} is given as well: leave one of them out.")
    seconds = _until(value, now, most_s) if isinstance(value, str) else _duration(field, value, most_s)
    return Deadline(slo_s=seconds, field=field, value=value)


def usual_deadline(
    found: tuple[DefaultSlo, str] | None, alone_s: Callable[[], float | None], most_s: float
) -> Deadline | None:
    """Return the deadline of a call that gives none, as if its client had sent `slo_s`; at most `most_s` seconds away.

    `found` is the default of the call and its source. `alone_s` returns how long the call takes alone, if that is
    needed.
    """
    if found is None:
        return None
    slo_s = found[0].slo_s(None if found[0].times is None else alone_s())
    if slo_s is None:
        return None
    slo_s = round(min(slo_s, most_s), 6)
    return Deadline(slo_s=slo_s, field="slo_s", value=slo_s, source=found[1])


def _duration(field: str, value: float, most_s: float) -> float:
    per_s, unit = _UNITS[field]
    if value > most_s * per_s:
        most = f"{most_s * per_s:.15g}"
        raise invalid(field, value, f"Give at most {most} {unit}, or leave it out for no deadline.")
    return value / per_s


def _until(text: str, now: datetime, most_s: float) -> float:
    time = parse_time(text)
    if time is None:
        raise invalid("deadline", text, f"Give {ImageRequest.model_fields['deadline'].description}.")
    seconds = (time - now).total_seconds()
    if not 0 < seconds <= most_s:
        clock = time_text(now.timestamp())
        remedy = f"This server's clock shows {clock}: give a later time, at most {most_s:g} seconds from then."
        raise invalid("deadline", text, remedy)
    return seconds
