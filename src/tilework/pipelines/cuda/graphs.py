"""Forward passes of a denoiser as CUDA graphs: the device does not wait for the host between two kernels.

A denoising step has a few thousand kernels. If the host takes longer to launch them than the device to run them, as
with U-Nets up to 1024 px on an H100, the device is idle. A graph launches the same kernels, recorded once, in one call,
so the bits are those of the eager call.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tilework.pipelines.components import is_denoiser, weights_of
from tilework.pipelines.family import Family

_log = logging.getLogger(__name__)
MOST_GRAPHS = 32


class Recorder(Protocol):
    """Records the work of a call, to be done again on the same memory."""

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Record a call; return a function that repeats it, and the result that it overwrites. Raises RuntimeError."""


@dataclass(slots=True, eq=False)
class CudaRecorder:
    """Records CUDA graphs. They share their memory, since one runs at a time and results are copied out of it."""

    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for previews or files. If recording fails, torch's own context
        # leaves its stream current: the outer context restores the previous one.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
        ):
            result = call()
        return graph.replay, result


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A recorded call: its inputs, the function that repeats it, and its results."""

    inputs: Sequence[Tensor]
    replay: Callable[[], object]
    outputs: Sequence[Any]
    form: TreeSpec
    context: object
    """Object that is kept because the graph reads its tensors."""

    def run(self, inputs: Sequence[Tensor]) -> Any:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.replay()
        return tree_unflatten([one.clone() if isinstance(one, Tensor) else one for one in self.outputs], self.form)


@dataclass(slots=True, eq=False)
class StepGraphs:
    """The forward of a module, recorded by shapes, types and other arguments of its calls; `most` graphs are kept.

    The second call of a kind is recorded, so a call that comes once costs nothing. These calls stay eager: those while
    `is_off` returns True, those with numbers that may change from step to step, and those of a kind that could not be
    recorded. `context` returns what else the result depends on, such as the layout of a packed batch: another object is
    another kind. Moved weights are noticed by their addresses.
    """

    module: nn.Module
    recorder: Recorder
    is_off: Callable[[], bool]
    context: Callable[[], object] = lambda: None
    most: int = MOST_GRAPHS
    _stock: Callable[..., Any] = field(init=False)
    _weights: tuple[Tensor, ...] = field(init=False)
    _place: Hashable = None
    _kinds: OrderedDict[Hashable, _Graph | None] = field(default_factory=OrderedDict)
    """Graphs by kind; None: seen once. A kind that cannot be recorded is in `_eager`."""
    _eager: set[Hashable] = field(default_factory=set)

    def install(self) -> StepGraphs:
        """Answer calls of the module from now on."""
        self._stock = self.module.forward
        self._weights = tuple(weights_of(self.module))  # A quantised weight has no address; its parts have.

        @functools.wraps(self._stock)  # Pipelines look at what it accepts.
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(args, kwargs)

        self.module.forward = forward
        return self

    @property
    def num_graphs(self) -> int:
        return sum(graph is not None for graph in self._kinds.values())

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_off():
            return self._stock(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        context = self.context()
        kind = _kind(leaves, form, context)
        if kind is None or kind in self._eager:
            return self._stock(*args, **kwargs)
        self._forget_if_moved()
        if kind not in self._kinds:
            self._keep(kind, None)
            return self._stock(*args, **kwargs)
        graph = self._kinds[kind]
        if graph is None:
            graph = self._record(leaves, form, context)
            if graph is None:
                del self._kinds[kind]
                self._eager.add(kind)
                return self._stock(*args, **kwargs)
            self._kinds[kind] = graph
        self._kinds.move_to_end(kind)
        return graph.run(tensors)

    def _record(self, leaves: Sequence[Any], form: TreeSpec, context: object) -> _Graph | None:
        device = self._weights[0].device
        mine = [leaf.detach().to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(mine, form)
        try:
            replay, result = self.recorder.record(lambda: self._stock(*args, **kwargs))
        except RuntimeError as error:
            _log.info("%s stays eager for calls of one kind: %s", type(self.module).__name__, error)
            return None
        outputs, output_form = tree_flatten(result)
        inputs = [one for one in mine if isinstance(one, Tensor)]
        return _Graph(inputs, replay, outputs, output_form, context)

    def _keep(self, kind: Hashable, graph: _Graph | None) -> None:
        self._kinds[kind] = graph
        while len(self._kinds) > self.most:
            self._kinds.popitem(last=False)

    def _forget_if_moved(self) -> None:
        place = hash(tuple(weight.data_ptr() for weight in self._weights))
        if place != self._place:
            self._place = place
            self._kinds.clear()


def _kind(leaves: Sequence[Any], form: TreeSpec, context: object) -> Hashable | None:
    """Return what calls that one graph can answer have in common; None if a number may differ from step to step."""
    described: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, (bool, int, str)):
            described.append(leaf)
        else:
            return None
    return (*described, form, id(context))


def record_steps(family: Family, recorder: Recorder) -> tuple[StepGraphs, ...]:
    """Let the forward passes of a family's denoisers be graphs of this recorder.

    These passes stay eager: in a group, of pipelines that change their attentions from request to request (PAG), of
    denoisers with LoRAs, image adapters, or weights that hooks move, and those with a cache.
    """
    graphs = (
        StepGraphs(
            module=module,
            recorder=recorder,
            is_off=partial(_changes, family, module),
            context=partial(getattr, family, "pass_context", None),  # Families that pack batches have it.
        )
        for module in family.modules.values()
        if is_denoiser(module)
    )
    return tuple(one.install() for one in graphs)


def _changes(family: Family, module: Any) -> bool:
    """Return whether the next pass may differ from a recorded one in more than its arguments."""
    return (
        family.parallel.degree > 1
        or getattr(family, "leaves_out", False)
        or getattr(module, "_hf_peft_config_loaded", False)
        or getattr(module, "encoder_hid_proj", None) is not None
        or bool(getattr(getattr(module, "_diffusers_hook", None), "hooks", None))
        or hasattr(module, "_hf_hook")
    )
