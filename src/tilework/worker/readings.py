"""Readings of a worker's card and of torch's allocator, by a separate thread, beside what runs.

NVML is asked through the package nvidia-ml-py, if that and the driver's library are there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import torch

from tilework.core.wire.reports import SLOWDOWNS, AllocatorReading, CardReading, DeviceReading, StartMemory

PERIOD_S = 5.0
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_REASONS: Sequence[tuple[str, str]] = (
    ("SwPowerCap", "power cap"),
    ("HwPowerBrakeSlowdown", "power brake"),
    ("SwThermalSlowdown", "temperature"),
    ("HwThermalSlowdown", "temperature"),
    ("HwSlowdown", "hardware"),
    ("SyncBoost", "other cards"),
    ("ApplicationsClocksSetting", "fixed clock"),
)
"""Reasons for a low clock: the end of the name of NVML's constant, and the word of SLOWDOWNS for it."""


@dataclass(frozen=True, slots=True)
class NvmlCard:
    """A card as NVML sees it; `nvml` is the module pynvml, initialised."""

    nvml: Any
    handle: Any

    @staticmethod
    def of(uuid: str) -> NvmlCard | None:
        """Return the card with this UUID of CUDA; None if there is no NVML, or it does not know the card."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return NvmlCard(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except pynvml.NVMLError as error:
            _log.info("NVML reports nothing of the card %s: %s", uuid, error)
            return None

    def read(self) -> CardReading:
        """Read the card's values now; takes a few milliseconds, and waits for no kernel."""
        nvml = self.nvml
        asked = self._asked
        memory = asked(nvml.nvmlDeviceGetMemoryInfo)
        clock_mhz, most_mhz = (
            asked(one, nvml.NVML_CLOCK_SM) for one in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
        )
        return CardReading(
            busy=_scaled(asked(nvml.nvmlDeviceGetUtilizationRates), lambda one: one.gpu / 100),
            total_bytes=_scaled(memory, lambda one: int(one.total)),
            used_bytes=_scaled(memory, lambda one: int(one.used)),
            worker_bytes=_scaled(asked(nvml.nvmlDeviceGetComputeRunningProcesses), _own_bytes),
            celsius=asked(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            watts=_scaled(asked(nvml.nvmlDeviceGetPowerUsage), lambda milliwatts: milliwatts / 1e3),
            limit_watts=_scaled(asked(nvml.nvmlDeviceGetEnforcedPowerLimit), lambda milliwatts: milliwatts / 1e3),
            hertz=_scaled(clock_mhz, lambda megahertz: megahertz * 10**6),
            most_hertz=_scaled(most_mhz, lambda megahertz: megahertz * 10**6),
            slowed_by=_scaled(asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons), self._reasons),
        )

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer; None if the card or the driver has none."""
        try:
            return function(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def _reasons(self, mask: int) -> tuple[str, ...]:
        named = ((getattr(self.nvml, f"nvmlClocksThrottleReason{name}"), word) for name, word in _REASONS)
        active = {word for bit, word in named if mask & bit}
        return tuple(word for word in SLOWDOWNS if word in active)


def _scaled(value: Any, scale: Callable[[Any], _T]) -> _T | None:
    return None if value is None else scale(value)


def _own_bytes(processes: Any) -> int | None:
    """Return the memory of this process; None if NVML does not list it, as in a container, or does not tell."""
    return next((one.usedGpuMemory for one in processes if one.pid == os.getpid()), None)


def read_allocator(device: torch.device) -> AllocatorReading:
    """Return the counts of torch's allocator in this process."""
    counts = torch.cuda.memory_stats(device)
    return AllocatorReading(
        reserved_bytes=counts.get("reserved_bytes.all.current", 0),
        allocated_bytes=counts.get("allocated_bytes.all.current", 0),
        peak_bytes=counts.get("allocated_bytes.all.peak", 0),
        split_bytes=counts.get("inactive_split_bytes.all.current", 0),
        num_retries=counts.get("num_alloc_retries", 0),
        num_failures=counts.get("num_ooms", 0),
    )


def read_start(device: torch.device, card: NvmlCard | None) -> StartMemory:
    """Return the memory of a device now, when models have been loaded and nothing has run."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    allocator = read_allocator(device)
    own_bytes = None if card is None else card.read().worker_bytes
    used_bytes = total_bytes - free_bytes if own_bytes is None else own_bytes
    return StartMemory(
        context_bytes=used_bytes - allocator.reserved_bytes,
        weights_bytes=allocator.allocated_bytes,
        free_bytes=free_bytes + allocator.reserved_bytes - allocator.allocated_bytes,
    )


def report_readings(device: torch.device, send: Callable[[DeviceReading], None]) -> None:
    """Send a reading of a CUDA device now and every PERIOD_S until the process ends; other devices send none.

    Called when the models have been loaded, and before anything runs.
    """
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # Each thread has its own current device.
        card = NvmlCard.of(str(torch.cuda.get_device_properties(device).uuid))
        reading = partial(_read, device, card, read_start(device, card))
        Thread(target=send_readings, args=(reading, send), name="readings", daemon=True).start()


def send_readings(read: Callable[[], DeviceReading], send: Callable[[DeviceReading], None]) -> None:
    """Send a reading every PERIOD_S, without end."""
    while True:
        send(read())
        time.sleep(PERIOD_S)


def _read(device: torch.device, card: NvmlCard | None, start: StartMemory) -> DeviceReading:
    return DeviceReading(card=None if card is None else card.read(), allocator=read_allocator(device), start=start)
