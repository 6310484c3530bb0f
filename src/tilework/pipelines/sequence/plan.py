"""Data that ranks need of a transformer to share its sequences, and where it is found in a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from tilework.pipelines.errors import UnsupportedModel

WHOLE = ""
"""Name in place of a sequence's: every rank keeps all of it."""


@dataclass(frozen=True)
class Split:
    """A value of which each rank keeps its piece: a tensor, a tuple of them, or a number of leading tokens.

    The `sequences` are concatenated along `dim`. With `ndim` only tensors of as many dimensions are split: for
    example a time for each token, but not one time for all of them. `optional` is True for an argument that variants of
    the submodule lack.
    """

    sequences: tuple[str, ...]
    dim: int = 1
    ndim: int | None = None
    optional: bool = False


@dataclass(frozen=True)
class Joint:
    """An attention over the pieces of all ranks; see `Parallel.attend`. `keys` are those of `queries` if None."""

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    pairs: bool = False


@dataclass(frozen=True)
class Gather:
    """A prediction of which each rank has its piece, and needs all of it."""

    sequence: str
    dim: int = 1


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Sharing of the sequences of one class of transformers among ranks.

    A submodule is named by its path; "" is the model, `*` stands for each child, and -1 for the last one.

    Attributes:
        attentions: by path, for every attention of the model; None for one that each rank computes alone, over its
            own queries and keys that are whole on every rank.
        inputs: by path, then by argument, what is split before the submodule runs.
        outputs: by path, then by index, what is split of its result; a single tensor has index 0.
        gathers: by path, the submodules whose result is gathered.
        whole: further arguments of the model, which are the same on every rank. In a group every other argument must
            be left at its default, since the row does not know how to share it.
        library: names in diffusers' own plan, `_cp_plan`, which is part of this one, by sequence: arguments,
            "path.index" of results, and paths of gathers. That plan says where and along which dimension to split;
            this says which sequence it is. Names under WHOLE need not be split.
        filled: sequences of which every rank must have a token, since the model slices from their end.
    """

    attentions: Mapping[str, Joint | None]
    whole: tuple[str, ...]
    inputs: Mapping[str, Mapping[str, Split]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, Split]] = field(default_factory=dict)
    gathers: Mapping[str, Gather] = field(default_factory=dict)
    library: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    filled: tuple[str, ...] = ()


def resolve(plan: SequencePlan, model: nn.Module) -> SequencePlan:
    """Return the plan with diffusers' own merged into it.

    Raises:
        UnsupportedModel: diffusers' plan and the row name different things.
    """
    if not plan.library:
        return plan
    inputs: dict[str, dict[str, Split]] = {path: dict(splits) for path, splits in plan.inputs.items()}
    outputs: dict[str, dict[int, Split]] = {path: dict(splits) for path, splits in plan.outputs.items()}
    gathers = dict(plan.gathers)
    sequences = {name: sequence for sequence, names in plan.library.items() for name in names}
    unused = set(sequences)

    def sequence(name: str) -> str:
        if name not in sequences:
            raise changed(model, f"{name!r} is new in its _cp_plan")
        unused.discard(name)
        return sequences[name]

    for path, entry in (getattr(model, "_cp_plan", None) or {}).items():
        if hasattr(entry, "gather_dim"):
            gathers[path] = Gather(sequence(path), entry.gather_dim)
            continue
        for key, how in entry.items():
            name = sequence(key if isinstance(key, str) else f"{path}.{key}")
            if name == WHOLE:
                continue
            split = Split((name,), how.split_dim, how.expected_dims)
            if isinstance(key, int):
                outputs.setdefault(path, {})[key] = split
            else:
                inputs.setdefault(path, {})[key] = split
    if unused:
        raise changed(model, f"{sorted(unused)} are not in its _cp_plan")
    return replace(plan, inputs=inputs, outputs=outputs, gathers=gathers)


def modules_at(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the submodules that a path of a plan names, in the model's order; none if `*` matches nothing.

    Raises:
        UnsupportedModel: there is no such submodule.
    """
    found = [model]
    for part in path.split(".") if path else ():
        found = [child for module in found for child in _children(model, module, part, path)]
    return found


def signature(
    model: nn.Module, path: str, module: nn.Module, splits: Mapping[str, Split], others: Iterable[str] = ()
) -> inspect.Signature:
    """Return the signature of a submodule's call.

    Raises:
        UnsupportedModel: it lacks some of these arguments.
    """
    found = inspect.signature(module.forward)
    names = (*others, *(name for name, split in splits.items() if not split.optional))
    missing = [name for name in names if name not in found.parameters]
    if missing:
        raise changed(model, f"{path or 'its forward'} has no argument {', '.join(missing)}")
    return found


def attentions_of(model: nn.Module, plan: SequencePlan) -> Iterator[tuple[nn.Module, Joint]]:
    """Yield the attention modules that ranks share.

    Raises:
        UnsupportedModel: the plan says nothing of an attention of the model.
    """
    paths = {path: re.compile(re.escape(path).replace(r"\*", r"[^.]+")) for path in plan.attentions}
    for name, module in model.named_modules():
        if not (hasattr(module, "processor") and hasattr(module, "set_processor")):
            continue
        path = next((path for path, pattern in paths.items() if pattern.fullmatch(name)), None)
        if path is None:
            raise changed(model, f"the attention {name} is new")
        joint = plan.attentions[path]
        if joint is not None:
            yield module, joint


def changed(model: nn.Module, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__}: {what}; diffusers has changed, and how a group shares this model is not known: "
        "install the version of diffusers that this version of Tilework names"
    )


def _children(model: nn.Module, module: nn.Module, part: str, path: str) -> list[nn.Module]:
    children = dict(module.named_children())
    if part == "*":
        return list(children.values())
    name = next(reversed(children), part) if part == "-1" else part
    if name not in children:
        raise changed(model, f"there is no submodule {path}")
    return [children[name]]
