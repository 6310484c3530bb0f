"""Lets the worker of a server that is measured record what it does. The server knows nothing of it.

Python imports this in each process whose PYTHONPATH has this folder. SIGUSR2 begins a recording of BENCH_RECORD_S
seconds. Then BENCH_RECORD_FILE appears, a JSON object: the events of the `device` and of the `host`, each [start, end,
name]; and `samples` of the main thread, each [time, innermost function, that of Tilework]. Times are nanoseconds of the
system's clock. After SIGUSR1 the worker waits for each step before it launches the next.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

SAMPLE_S = 0.002


class Recording:
    def __init__(self, seconds: float, path: str) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._path, self._samples = path, list[tuple[int, str, str]]()
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.start()
        threading.Thread(target=self._sample, args=(seconds, threading.get_ident()), daemon=True).start()

    def _sample(self, seconds: float, thread: int) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            time.sleep(SAMPLE_S)
            frame: FrameType | None = sys._current_frames().get(thread)
            self._samples.append((time.time_ns(), *_functions(frame)))
        os.kill(os.getpid(), signal.SIGUSR2)

    def end(self) -> None:
        self._profile.stop()
        events: Any = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        found: dict[str, list[tuple[int, int, str]]] = {"device": [], "host": []}
        for one in events:
            where = "host" if str(one.device_type()).endswith("CPU") else "device"
            found[where].append((one.start_ns(), one.start_ns() + one.duration_ns(), one.name()))
        answer = {**found, "samples": self._samples}
        with open(f"{self._path}.part", "w", encoding="utf-8") as file:
            json.dump(answer, file)
        os.replace(f"{self._path}.part", self._path)


def _functions(frame: FrameType | None) -> tuple[str, str]:
    """The innermost function, and the innermost of Tilework."""
    inner = "" if frame is None else _name(frame)
    while frame is not None and "/tilework/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return inner, "" if frame is None else _name(frame)


def _name(frame: FrameType) -> str:
    place = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{frame.f_code.co_name} ({place})"


_open: list[Recording] = []


def _signalled(*_: object) -> None:
    if _open:
        _open.pop().end()
    else:
        _open.append(Recording(float(os.environ["BENCH_RECORD_S"]), os.environ["BENCH_RECORD_FILE"]))


def _wait_for_each_step(*_: object) -> None:
    from tilework.worker import launched_steps

    launched_steps.SHORT_STEP_NS = 0


def _listen() -> None:
    signal.signal(signal.SIGUSR1, _wait_for_each_step)
    signal.signal(signal.SIGUSR2, _signalled)


os.register_at_fork(after_in_child=_listen)
_listen()
