"""The schedule file: round trip, the design's own lines, and mistakes named with their place."""

import json

import pytest

from tilework.formats.json_lines import BadLine
from tilework.formats.schedule import (
    MoveLine,
    RequestLine,
    Schedule,
    WeightsLine,
    WorkLine,
    read_schedule,
    write_schedule,
)

WORK = {"work": 7, "stage": "diffuse", "requests": [3], "devices": [0, 1], "start_s": 1.25, "end_s": 1.56, "steps": 10}
END = {"request": 3, "finish_s": 2.9, "status": "done", "on_time": True}
MOVE = {"move": 3, "from": 0, "to": 1, "start_s": 1.0, "end_s": 1.1}
LOAD = {"load": 0, "pipeline": "shapes", "stage": "decode", "start_s": 0.0, "end_s": 0.4}


def written(tmp_path, *lines):
    path = tmp_path / "schedule.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_documented_lines_round_trip(tmp_path):
    path = written(tmp_path, WORK, END, MOVE, LOAD)
    schedule = read_schedule(path)
    assert schedule == Schedule(
        (WorkLine(work=7, stage="diffuse", requests=(3,), devices=(0, 1), start_s=1.25, end_s=1.56, steps=10),),
        (RequestLine(request=3, finish_s=2.9, status="done", on_time=True),),
        (MoveLine(request=3, source=0, target=1, start_s=1.0, end_s=1.1),),
        (WeightsLine(change="load", device_id=0, pipeline="shapes", stage="decode", start_s=0.0, end_s=0.4),),
    )
    write_schedule(path, schedule)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [WORK, END, MOVE, LOAD]
    assert read_schedule(path) == schedule


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ({"wrok": 7}, "", "start the line with one of work, request"),
        ({**WORK, "step": 1}, "step", 'did you mean "steps"'),
        ({**WORK, "work": 8, "devices": []}, "devices", "at least one"),
        ({**WORK, "work": 8, "devices": [0, 0]}, "devices", "each different"),
        ({**WORK, "work": 8, "devices": [-1]}, "devices", "at least 0"),
        ({**WORK, "work": 8, "requests": 3}, "requests", "list"),
        ({**WORK, "work": 8, "requests": [None]}, "requests", "name"),
        ({**WORK, "work": 8, "end_s": 1.2}, "end_s", "at least 1.25"),
        (WORK, "work", "comes once"),
        ({**END, "status": "fine"}, "status", "done, dropped, cancelled, failed"),
        ({**END, "on_time": 1}, "on_time", "true or false"),
        ({**MOVE, "to": "1"}, "to", "whole number"),
        ({**LOAD, "drop": 1}, "drop", "no such field"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, field, words):
    with pytest.raises(BadLine) as caught:
        read_schedule(written(tmp_path, WORK, line))
    assert (caught.value.line, caught.value.field) == (2, field)
    assert words in str(caught.value)
