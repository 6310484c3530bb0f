"""What cards and allocators say of themselves, with an emulated NVML. None of it was run on a card."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilework.core.wire.reports import AllocatorReading, CardReading, DeviceReading, StartMemory
from tilework.worker import readings
from tilework.worker.readings import NvmlCard, read_allocator, read_start, report_readings, send_readings

GB = 10**9
START = StartMemory(context_bytes=1, weights_bytes=2, free_bytes=3)


class NVMLError(Exception):
    """NVML's own exception."""


def refusing(*_: object) -> Any:
    raise NVMLError("Not Supported")


def nvml(**changes: Callable[..., Any]) -> Any:
    """The module pynvml, of a machine with one card that tells everything."""
    reasons = {
        "SwPowerCap": 0x4,
        "HwSlowdown": 0x8,
        "SyncBoost": 0x10,
        "SwThermalSlowdown": 0x20,
        "HwThermalSlowdown": 0x40,
        "HwPowerBrakeSlowdown": 0x80,
        "ApplicationsClocksSetting": 0x2,
    }
    usual: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=97, memory=40),
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=80 * GB, used=30 * GB, free=50 * GB),
        "nvmlDeviceGetComputeRunningProcesses": lambda card: [
            SimpleNamespace(pid=1, usedGpuMemory=4 * GB),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=20 * GB),
        ],
        "nvmlDeviceGetTemperature": lambda card, kind: 61,
        "nvmlDeviceGetPowerUsage": lambda card: 540_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda card: 700_000,
        "nvmlDeviceGetClockInfo": lambda card, kind: 1755,
        "nvmlDeviceGetMaxClockInfo": lambda card, kind: 1980,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: 0x1 | 0x4 | 0x20 | 0x40,
        **{f"nvmlClocksThrottleReason{name}": bit for name, bit in reasons.items()},
    }
    return SimpleNamespace(**(usual | changes))


def test_a_card_says_all() -> None:
    assert NvmlCard(nvml(), "a card").read() == CardReading(
        busy=0.97,
        total_bytes=80 * GB,
        used_bytes=30 * GB,
        worker_bytes=20 * GB,
        celsius=61,
        watts=540.5,
        limit_watts=700.0,
        hertz=1_755_000_000,
        most_hertz=1_980_000_000,
        slowed_by=("power cap", "temperature"),
    )


def test_what_a_card_does_not_tell_is_not_known() -> None:
    silent = {name: refusing for name in vars(nvml()) if name.startswith("nvmlDeviceGet")}
    assert NvmlCard(nvml(**silent), "a card").read() == CardReading()
    elsewhere = nvml(nvmlDeviceGetComputeRunningProcesses=lambda card: [SimpleNamespace(pid=1, usedGpuMemory=4 * GB)])
    assert NvmlCard(elsewhere, "a card").read().worker_bytes is None, "in a container it has other process ids"
    idle = nvml(nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: 0x1)
    assert NvmlCard(idle, "a card").read().slowed_by == ()


def test_a_card_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, handle in (
        (None, None),
        (nvml(nvmlInit=refusing), None),
        (nvml(nvmlDeviceGetHandleByUUID=refusing), None),
        (nvml(), "GPU-12ab"),
    ):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        found = NvmlCard.of("12ab")
        assert (None if found is None else found.handle) == handle


def test_the_real_package_has_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in vars(nvml()) if not hasattr(pynvml, name)] == []
    assert NvmlCard.of("12ab") is None, "there is no such card"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that uses the second of two devices."""
    counts = {
        "reserved_bytes.all.current": 9,
        "allocated_bytes.all.current": 7,
        "allocated_bytes.all.peak": 8,
        "inactive_split_bytes.all.current": 2,
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counts if device == torch.device("cuda:1") else {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of {device}"))


@pytest.mark.usefixtures("cuda")
def test_readings_come_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, waited = list[DeviceReading](), list[float]()

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise StopIteration

    monkeypatch.setattr("tilework.worker.readings.time.sleep", wait)
    with pytest.raises(StopIteration):
        send_readings(partial(readings._read, torch.device("cuda:1"), None, START), heard.append)
    allocator = AllocatorReading(
        reserved_bytes=9, allocated_bytes=7, peak_bytes=8, split_bytes=2, num_retries=3, num_failures=1
    )
    assert heard == [DeviceReading(card=None, allocator=allocator, start=START)] * 2
    assert waited == [readings.PERIOD_S] * 2
    assert read_allocator(torch.device("cuda:0")).num_retries == 0


@pytest.mark.usefixtures("cuda")
def test_they_come_from_a_thread_of_their_own_that_knows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: SimpleQueue[tuple[DeviceReading, int]] = SimpleQueue()

    def send_some(read: Callable[[], DeviceReading], send: Callable[[DeviceReading], None]) -> None:
        heard.put((read(), threading.get_ident()))

    handles = list[str]()
    known = nvml(nvmlDeviceGetHandleByUUID=lambda uuid: (handles.append(uuid), uuid)[1])
    monkeypatch.setattr(readings, "send_readings", send_some)
    monkeypatch.setitem(sys.modules, "pynvml", known)
    report_readings(torch.device("cuda"), lambda _reading: None)
    reading, thread = heard.get(timeout=60)
    assert reading.allocator == read_allocator(torch.device("cuda:1")), "threads have a current device of their own"
    assert reading.start == read_start(torch.device("cuda:1"), NvmlCard(known, "a card"))
    assert handles == ["GPU-of cuda:1"]
    assert thread != threading.get_ident()


@pytest.mark.usefixtures("cuda")
def test_what_the_start_took_is_the_context_and_the_weights() -> None:
    """Of 80 GB are 50 GB free; the allocator has 9 bytes, of which tensors take 7."""
    device = torch.device("cuda:1")
    told = read_start(device, NvmlCard(nvml(), "a card"))
    assert told == StartMemory(context_bytes=20 * GB - 9, weights_bytes=7, free_bytes=50 * GB + 2)
    untold = read_start(device, None)
    assert untold.context_bytes == 30 * GB - 9, "with that of other programs"


def test_a_cpu_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(_reading: DeviceReading) -> None:
        raise AssertionError

    def start(thread: threading.Thread) -> None:
        raise AssertionError(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    report_readings(torch.device("cpu"), send)
