"""Hooks that make a transformer of diffusers run on the pieces of `Parallel`, as a row of `SEQUENCES` says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from tilework.pipelines.hooks import SharedAttention
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.sequence.plan import (
    SequencePlan,
    Split,
    attentions_of,
    changed,
    modules_at,
    resolve,
    signature,
)
from tilework.pipelines.sequence.rows import SEQUENCES


def share(model: nn.Module, parallel: Parallel) -> bool:
    """Let ranks share the sequences of a transformer. Return False if its class has no row: it runs at degree 1 only.

    Call it once for a model, before `packing` substitutes anything. In a group a call of the model raises
    RuntimeError if it is given arguments that its row does not know.

    Raises:
        UnsupportedModel: the model is built otherwise than its row says. Nothing is hooked then.
    """
    if type(model).__name__ not in SEQUENCES:
        return False
    plan = resolve(SEQUENCES[type(model).__name__], model)
    for install in [*_splits(model, plan, parallel), *_gathers(model, plan, parallel)]:
        install()
    return True


Install = Callable[[], Any]


def _splits(model: nn.Module, plan: SequencePlan, parallel: Parallel) -> list[Install]:
    """Check the places where something is split; return functions that install the hooks."""
    called = signature(model, "", model, plan.inputs.get("", {}), plan.whole)
    begin = partial(_begin, parallel, plan, type(model).__name__, called)
    installs: list[Install] = [partial(model.register_forward_pre_hook, begin, with_kwargs=True)]
    split = partial(_split, parallel, plan)
    for path, arguments in plan.inputs.items():
        for module in modules_at(model, path):
            before = partial(_before, parallel, split, arguments, signature(model, path, module, arguments))
            installs.append(partial(module.register_forward_pre_hook, before, with_kwargs=True))
    for path, results in plan.outputs.items():
        after = partial(_after, parallel, split, results)
        installs += [partial(module.register_forward_hook, after) for module in modules_at(model, path)]
    return installs


def _gathers(model: nn.Module, plan: SequencePlan, parallel: Parallel) -> list[Install]:
    """Check the places where pieces come together; return functions that install the hooks."""

    def gather(sequence: str, dim: int, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return None if parallel.degree == 1 else parallel.gather(output, sequence, dim)

    installs: list[Install] = []
    for path, how in plan.gathers.items():
        modules = modules_at(model, path)
        if not modules:
            raise changed(model, f"there is no submodule {path}")
        after = partial(gather, how.sequence, how.dim)
        installs += [partial(module.register_forward_hook, after) for module in modules]
    for attention, joint in attentions_of(model, plan):
        shared = SharedAttention(attention.forward, parallel, joint.queries, joint.keys, joint.pairs)
        installs.append(partial(setattr, attention, "forward", shared))
    return installs


def _begin(
    parallel: Parallel,
    plan: SequencePlan,
    name: str,
    called: inspect.Signature,
    module: nn.Module,
    args: Any,
    given: Any,
) -> None:
    """Begin a forward pass of the model, and check that it gets only arguments that the row knows."""
    if parallel.degree == 1:
        return
    parallel.begin_pass()
    known = {*plan.whole, *plan.inputs.get("", ())}
    for argument, value in called.bind(*args, **given).arguments.items():
        default = called.parameters[argument].default
        is_default = value is None or (isinstance(value, int | float | str) and value == default)
        if argument not in known and not is_default:
            raise RuntimeError(f"{name} is given {argument}, which a group cannot share; use degree 1")


def _before(
    parallel: Parallel,
    split: Callable[[Any, Split], Any],
    arguments: Mapping[str, Split],
    called: inspect.Signature,
    module: nn.Module,
    args: Any,
    given: Any,
) -> tuple[Any, Any] | None:
    if parallel.degree == 1:
        return None
    bound = called.bind(*args, **given)
    for name, how in arguments.items():
        if name in bound.arguments:
            bound.arguments[name] = split(bound.arguments[name], how)
    return bound.args, bound.kwargs


def _after(
    parallel: Parallel,
    split: Callable[[Any, Split], Any],
    results: Mapping[int, Split],
    module: nn.Module,
    args: Any,
    output: Any,
) -> Any:
    if parallel.degree == 1:
        return None
    if isinstance(output, Tensor):
        return split(output, results[0])
    return tuple(split(part, results[index]) if index in results else part for index, part in enumerate(output))


def _split(parallel: Parallel, plan: SequencePlan, value: Any, how: Split) -> Any:
    """Return this rank's piece of a value; see `Split`."""
    if isinstance(value, tuple | list):
        return type(value)(_split(parallel, plan, part, how) for part in value)
    if value is None or (isinstance(value, Tensor) and how.ndim not in (None, value.ndim)):
        return value
    if isinstance(value, int):
        return parallel.leading(value, how.sequences[0])
    if len(how.sequences) > 1:
        return parallel.pick(value, how.sequences, how.dim)
    (sequence,) = how.sequences
    if sequence in plan.filled and value.shape[how.dim] < parallel.width:
        raise RuntimeError(
            f"{parallel.width} ranks cannot share {value.shape[how.dim]} tokens of {sequence}; use fewer"
        )
    return parallel.split(value, sequence, how.dim)
