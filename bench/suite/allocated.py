"""What torch's allocator of the CPU gives out, call by call: the same each time, unlike the memory of a process."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

_EVENT = "[memory]"


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that is given out at a time while `run` runs, beyond what was there before; kernels' own included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((one for one in events if one.name() == _EVENT), key=lambda one: one.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
