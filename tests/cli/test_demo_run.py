"""Whether two runs of a demo gave the same: pixels of pictures, files of clips."""

from __future__ import annotations

import io

from PIL import Image

from tilework.cli.commands.demo import different
from tilework.client.record import CallEnd, Record
from tilework.formats.workload import WorkloadRequest


def picture(colour: str, level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG", compress_level=level)
    return file.getvalue()


def record(file: bytes | None, frames: int = 1) -> Record:
    request = WorkloadRequest(arrival_s=0.0, pipeline="shapes", height=8, width=8, steps=1, frames=frames)
    return Record(index=0, request=request, arrival_s=0.0, status=CallEnd.DONE, latency_s=1.0, file=file)


def test_results_are_compared_bit_for_bit() -> None:
    plain, packed, other = picture("red", 0), picture("red", 9), picture("#ff0001", 0)
    assert plain != packed
    expected = [record(plain), record(plain), record(b"mp4", 5), record(b"mp4", 5), record(plain), record(None)]
    found = [record(packed), record(other), record(b"mp4", 5), record(b"mp5", 5), record(None), record(None)]
    assert different(expected, found) == [found[1], found[3], found[4]]
