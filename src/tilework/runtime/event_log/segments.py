"""The files of an event log, by name.

The newest segment has the name of the log, `events.jsonl`, and is text. Earlier ones are closed: numbered from 1,
and compressed, `events.000001.jsonl.gz`. For a moment, or if the server was killed then, a closed one is still text.
The log of an earlier start that had the same name is `events-start2.jsonl`, with segments of its own.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Generator, Iterable
from pathlib import Path

PACKED = ".gz"
PART = ".part"
"""End of a compressed file's name until the file is whole."""
START = b'{"tilework_log"'
"""First bytes of a log."""
_LOG = re.compile(r"events(?:-(\d+))?\.jsonl")


def closed_path(log: Path, segment: int) -> Path:
    """Return the name of a closed segment of a log, before it is compressed."""
    return log.with_name(f"{log.stem}.{segment:06d}{log.suffix}")


def closed_paths(log: Path) -> list[Path]:
    """Return the closed segments of a log, oldest first; of one in both forms, the text, which is whole."""
    name = re.compile(rf"{re.escape(log.stem)}\.(\d{{6,}}){re.escape(log.suffix)}({re.escape(PACKED)})?")
    found: dict[int, Path] = {}
    for path in sorted(log.parent.iterdir(), reverse=True):  # The text comes last.
        if match := name.fullmatch(path.name):
            found[int(match[1])] = path
    return [found[segment] for segment in sorted(found)]


def keep_earlier(log: Path) -> bool:
    """Rename a log with lines, and its segments, as of an earlier start; returns whether it had any. Raises OSError."""
    closed = closed_paths(log)
    if not closed and not log.stat().st_size:
        return False
    starts = re.compile(rf"{re.escape(log.stem)}-start(\d+){re.escape(log.suffix)}")
    numbers = [int(match[1]) for path in log.parent.iterdir() if (match := starts.fullmatch(path.name))]
    earlier = f"{log.stem}-start{max(numbers, default=0) + 1}"
    for path in [*closed, log]:  # The log is last: an interrupted renaming goes on at the next start.
        path.rename(path.with_name(earlier + path.name.removeprefix(log.stem)))
    return True


def names_of(log: Path) -> re.Pattern[str]:
    """Return a pattern for the names of a log, of its closed segments, and of both at earlier starts."""
    stem, suffix, packed, part = (re.escape(text) for text in (log.stem, log.suffix, PACKED, PART))
    return re.compile(rf"{stem}(-start\d+)?(\.\d{{6,}})?{suffix}({packed}({part})?)?")


def newest_log(directory: Path) -> Path:
    """Return the log of the latest start in a directory: `events-12.jsonl`, or `events.jsonl`.

    Raises FileNotFoundError.
    """
    logs = [(int(match[1] or 0), path) for path in directory.iterdir() if (match := _LOG.fullmatch(path.name))]
    if not logs:
        raise FileNotFoundError(2, "the directory has no event log, events.jsonl or events-N.jsonl", str(directory))
    return max(logs)[1]


def segments_of(place: Path) -> list[Path]:
    """Return the files of a log, in order: of the newest in a directory, of one by its name, or a closed segment alone.

    Raises OSError.
    """
    log = (newest_log(place) if place.is_dir() else place).resolve()
    return [*closed_paths(log), log] if log.parent.is_dir() else [log]


def lines_of(paths: Iterable[Path]) -> Generator[str]:
    """Yield the lines of files, one after another. Raises OSError."""
    for path in paths:
        yield from _lines(path)


def _lines(path: Path) -> Generator[str]:
    packed = path.with_name(path.name + PACKED)
    if path.suffix != PACKED and not path.exists() and packed.exists():  # It was compressed meanwhile.
        path = packed
    if path.suffix == PACKED:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
            yield from lines
    else:
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from lines
