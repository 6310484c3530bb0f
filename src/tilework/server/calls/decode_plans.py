"""Refuses a decode that no device has the memory for, before any of the request runs.

The memory that kernels take beside tensors counts for float32 on CPUs, where it is known; elsewhere a decode is refused
only if its tensors alone are too much. Rejected: plans on the thread that answers calls, since one takes up to seconds;
and activations in the cost table, which would be interpolated.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tilework.core.model import DecodeMemory, ModelInfo
from tilework.core.request import Shape
from tilework.core.wire.spec import Spec
from tilework.runtime.worker_process import forkserver_context
from tilework.server.calls.errors import InvalidValue, invalid
from tilework.server.calls.parsing.sizes import size_text

_log = logging.getLogger(__name__)
_MOST_KEPT = 100  # Per model; clients choose the shapes.
_GB = 1e9
Planner = Callable[[DecodeMemory, Shape, int], int]


def planned_elsewhere(memory: DecodeMemory, shape: Shape, degree: int) -> int:
    """Run `pipelines.clips.plan.planned_bytes` in its own process: it takes a second, and 7 in tiles at 720p."""
    from tilework.pipelines.clips.plan import planned_bytes

    with ProcessPoolExecutor(1, forkserver_context(), signal.signal, (signal.SIGINT, signal.SIG_IGN)) as process:
        return process.submit(planned_bytes, memory, shape, degree).result()


@dataclass(slots=True, eq=False)
class DecodePlans:
    """Plans of decodes, for models whose memory for them is known (`ModelInfo.decode`).

    A decode is planned unless a larger one fits, or a smaller one does not. `num_devices` counts those that serve a
    model, and may share a decode. `plan` returns the bytes that a decode takes.
    """

    num_devices: Callable[[str], int]
    plan: Planner = planned_elsewhere
    _planned: dict[tuple[DecodeMemory, int], dict[Shape, int]] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def check(self, info: ModelInfo, spec: Spec) -> bool:
        """Check that the devices have the memory to decode a request; return whether this had to wait for a plan.

        Raises:
            InvalidValue: no device has the memory for the decode of this request.
        """
        if info.decode is None:
            return False
        degree = self._degree(info, spec)
        planned = self._planned.setdefault((info.decode, degree), {})
        has_waited = not _is_known(planned, spec.shape, info.decode.most_bytes)
        if has_waited:
            async with self._lock:  # Another request may ask for the same plan meanwhile.
                if not _is_known(planned, spec.shape, info.decode.most_bytes):
                    await self._add(planned, info, info.decode, spec.shape, degree)
        needed = max((num_bytes for shape, num_bytes in planned.items() if _is_within(shape, spec.shape)), default=0)
        if needed > info.decode.most_bytes:
            raise _refused(info.decode, spec.shape, needed, degree)
        return has_waited

    async def _add(
        self, planned: dict[Shape, int], info: ModelInfo, memory: DecodeMemory, shape: Shape, degree: int
    ) -> None:
        try:
            num_bytes = await asyncio.to_thread(self.plan, memory, shape, degree)
        except Exception:
            _log.exception(
                "the memory of the decode of %s by %s cannot be predicted; the decode is tried", shape, info.name
            )
            num_bytes = 0
        if len(planned) >= _MOST_KEPT:
            planned.clear()
        planned[shape] = num_bytes

    def _degree(self, info: ModelInfo, spec: Spec) -> int:
        """Return the most devices that may share the decode."""
        shares = any(stage.steps is None and stage.degrees != (1,) for stage in info.stages)
        return min(info.max_degree, self.num_devices(info.name)) if shares and not spec.exact else 1


def _is_known(planned: Mapping[Shape, int], shape: Shape, most_bytes: int) -> bool:
    """Return whether a decode is known to fit, since a larger one does, or not to fit, since a smaller one does not."""
    return any(
        _is_within(shape, one) if num_bytes <= most_bytes else _is_within(one, shape)
        for one, num_bytes in planned.items()
    )


def _refused(memory: DecodeMemory, shape: Shape, needed: int, degree: int) -> InvalidValue:
    each = "" if degree == 1 else f" on each of {degree} devices"
    fewer = "" if shape.frames == 1 else f", or fewer num_frames than {shape.frames}"
    tiles = "" if memory.in_tiles else " A server that is started with --vae-tiling decodes in tiles."
    return invalid(
        "size",
        size_text(shape),
        f"Its decode needs {needed / _GB:.2f} GB or more{each}, and {memory.most_bytes / _GB:.2f} GB are available: "
        f"give a smaller one{fewer}.{tiles}",
    )


def _is_within(small: Shape, large: Shape) -> bool:
    return small.height <= large.height and small.width <= large.width and small.frames <= large.frames
