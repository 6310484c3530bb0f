"""Choice of cells, for models that exceed one device: the smallest cell in which all their stages fit.

The bytes of a component's blocks, and of what is in no block, say what a device needs of it in a cell of any size
(`core.component.WeightBlocks`). Rejected: to start workers in ever larger cells until one fits, which reads all models
at each try; and `auto` as the default, which reads models once more where nothing exceeds a device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilework.core.component import MOST_IN_CELL
from tilework.core.model import Source
from tilework.core.wire.commands import Site
from tilework.core.wire.reports import LoadFailed, ModelSize, Report, Sized
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.worker_process import WorkerProcess

_READER = -1  # Id in place of a device's: of a process that serves none.


@dataclass(frozen=True, slots=True, kw_only=True)
class CellChoice:
    """Cells of `size` devices for these models. Each device has `room_bytes` for weights."""

    size: int
    models: tuple[ModelSize, ...]
    room_bytes: int

    def lines(self) -> Iterator[str]:
        """Yield in words what each device holds: for each model a line, with the needs of each of its stages."""
        place = f"cells of {self.size} devices" if self.size > 1 else "no cells: a device has room for each stage"
        yield f"{place}; of {_shown(self.room_bytes)} for weights each device needs"
        for model in self.models:
            held = {name: one.held_bytes(self.size) for name, one in model.components.items()}
            stages = [
                f"{_shown(size)} for {stage} ({', '.join(f'{name} {_shown(held[name])}' for name in names)})"
                for stage, size in model.held_bytes(self.size).items()
                if (names := model.stages[stage])
            ]
            yield f"  {model.name}: {', '.join(stages)}"


def smallest_cell(models: Sequence[ModelSize], num_devices: int, room_bytes: int) -> CellChoice:
    """Return the smallest cells into which these devices can be divided and in which all stages of the models fit.

    Raises:
        WorkerStartFailed: there are none; the message says what would help.
    """
    widest = min([MOST_IN_CELL, *(model.max_degree for model in models)])
    sizes = [size for size in range(1, min(num_devices, widest) + 1) if num_devices % size == 0]
    for size in sizes:
        if _needed(models, size)[0] <= room_bytes:
            return CellChoice(size=size, models=tuple(models), room_bytes=room_bytes)
    needed, stage, model = min(_needed(models, size) for size in sizes)
    more = [size for size in range(num_devices + 1, widest + 1) if _needed(models, size)[0] <= room_bytes]
    remedies = [f"give a device {_shown(needed)} (--weights-memory)", "choose a dtype of 16 bits"]
    remedies[1:1] = [f"serve on {more[0]} devices (--devices {more[0]})"] if more else []
    limit = f"; {model} runs on at most {widest} devices at once" if not more and widest < MOST_IN_CELL else ""
    raise WorkerStartFailed(
        f"no cell fits: in the best of {', '.join(map(str, sizes))} devices, each needs {_shown(needed)} for the stage "
        f"{stage} of {model}, and has {_shown(room_bytes)} for weights{limit}; {', '.join(remedies[:-1])}, or "
        f"{remedies[-1]}"
    )


def _needed(models: Sequence[ModelSize], size: int) -> tuple[int, str, str]:
    """Return the need of each device of a cell for the largest stage; that stage, and its model."""
    return max((held, stage, model.name) for model in models for stage, held in model.held_bytes(size).items())


async def sizes_of(sources: Sequence[Source], timeout_s: float = 600.0, grace_s: float = 5.0) -> tuple[ModelSize, ...]:
    """Return the sizes of these models. A process of its own reads them, and keeps nothing.

    Raises:
        WorkerStartFailed: one of them cannot be read.
    """
    answer: asyncio.Future[tuple[ModelSize, ...]] = asyncio.get_running_loop().create_future()

    def on_report(report: Report) -> None:
        if isinstance(report, Sized) and not answer.done():
            answer.set_result(report.models)
        elif isinstance(report, LoadFailed):
            reader.set_exit_reason(report.reason)

    def on_exit(reason: str) -> None:
        if not answer.done():
            answer.set_exception(WorkerStartFailed(reason))

    reader = WorkerProcess(Site(device_id=_READER, blobs="", sizes=True), sources, on_report, on_exit)
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise WorkerStartFailed(f"the models were not read within {timeout_s:g} s") from None
    finally:
        await reader.close(grace_s)


def _shown(num_bytes: int) -> str:
    """Return bytes in words, rounded up, so that the shown number is enough."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if num_bytes >= size:
            tenths = -(-num_bytes * 10 // size)
            return f"{tenths / 10:g}{unit}"
    return f"{num_bytes} bytes"
