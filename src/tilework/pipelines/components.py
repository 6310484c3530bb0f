"""The modules of a stock pipeline, and which stage calls which of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diffusers import ModelMixin
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tilework.core.graph.stage import StageSpec
from tilework.pipelines.bands.decoders import is_known
from tilework.pipelines.clips.decoders import decoder_of

TIMES = frozenset({"timestep", "timesteps", "t", "time", "sigma", "time_step"})
_AFTER = frozenset({"safety_checker", "vocoder"})  # Called after the loop, besides autoencoders.


def modules_of(pipeline: Any) -> dict[str, nn.Module]:
    """Return the components that have weights, by name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return all weights of a module, tied ones once, in the order of their names.

    A quantised weight is given as the tensors that it consists of: each has its own memory, and can be replaced there.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [part for name in sorted(named) for part in parts_of(named[name])]


def parts_of(weight: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with their own memory that a weight consists of; the weight itself, unless it is quantised."""
    if is_traceable_wrapper_subclass(weight):  # torchao.
        for name in weight.__tensor_flatten__()[0]:
            yield from parts_of(getattr(weight, name))
        return
    yield weight
    if (state := getattr(weight, "quant_state", None)) is not None:  # bitsandbytes.
        yield from (state.absmax, state.code)


def decodes_in_tiles(pipeline: Any) -> bool:
    """Return whether the autoencoder is set to cut images into tiles, and to blend these where they meet."""
    return bool(getattr(getattr(pipeline, "vae", None), "use_tiling", False))


def shares_decode(pipeline: Any) -> bool:
    """Return whether several devices can share a decode of the autoencoder: bands of rows, or tiles of clips."""
    vae = getattr(pipeline, "vae", None)
    return is_known(vae) and (not decodes_in_tiles(pipeline) or decoder_of(vae) is not None)


def is_denoiser(component: Any) -> bool:
    """Return whether a component is a model of diffusers that depends on a time, and no autoencoder."""
    return is_denoiser_class(type(component))


def is_denoiser_class(kind: Any) -> bool:
    """Return whether the instances of a class are denoisers."""
    is_model = isinstance(kind, type) and issubclass(kind, ModelMixin) and not hasattr(kind, "decode")
    return is_model and not TIMES.isdisjoint(inspect.signature(kind.forward).parameters)


def denoisers_of(pipeline: Any) -> dict[str, Any]:
    """Return the denoisers of a pipeline, by the names of their components."""
    return {name: component for name, component in pipeline.components.items() if is_denoiser(component)}


def blocks_of(component: nn.Module) -> Iterator[nn.Module]:
    """Yield modules of a component that run one after another, each with weights that nothing else reads meanwhile.

    They are the members of lists of modules, and the modules beside these. An autoencoder has none: the first rank of a
    group draws previews with it while the others do something else.
    """
    if not hasattr(component, "decode") and _has_list(component):
        yield from _blocks_within(component, set())


def _blocks_within(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        is_called = type(child).forward is not nn.Module.forward
        if child in seen:
            continue
        if is_called and (isinstance(module, nn.ModuleList) or not _has_list(child)):
            seen.add(child)
            yield child
        else:
            yield from _blocks_within(child, seen)


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(one, nn.ModuleList) for one in module.modules())


@dataclass(frozen=True, slots=True)
class ComponentGroups:
    """The names of the modules that are called before the denoising loop, in it and after it."""

    before: tuple[str, ...]
    within: tuple[str, ...]
    after: tuple[str, ...]

    @staticmethod
    def of(pipeline: Any, *, takes_pictures: bool = False) -> ComponentGroups:
        """Group a pipeline's modules. If requests give images, the autoencoder is also called before the loop."""
        modules = modules_of(pipeline)
        within = denoisers_of(pipeline)
        others = {name: part for name, part in modules.items() if name not in within}
        after = {name for name, part in others.items() if hasattr(part, "decode") or name in _AFTER}
        before = [name for name in others if name not in after or (takes_pictures and name not in _AFTER)]
        return ComponentGroups(tuple(before), tuple(within), tuple(sorted(after)))

    def named(self, stages: Sequence[StageSpec], *, previews: bool = True) -> tuple[StageSpec, ...]:
        """Return the stages, with the modules in place of the components that the shipped graph names.

        A stage with previews also calls the modules that draw them. Without `previews` there are none.
        """
        if not previews:
            stages = [replace(one, previews="") for one in stages]
        groups = {"text_encoder": self.before, "denoiser": self.within, "vae": self.after}
        found = {
            one.name: tuple(module for name in one.components for module in groups.get(name, (name,))) for one in stages
        }
        return tuple(
            replace(one, components=tuple(dict.fromkeys((*found[one.name], *found.get(one.previews, ())))))
            for one in stages
        )
