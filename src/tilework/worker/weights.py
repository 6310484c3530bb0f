"""The weights of a worker's components: which lie on its device, and from where the others can be loaded.

Weights that are not on the device lie in files that the workers of a node share (`shared_weights`), as long as these
have room for them, and in the directory of their model. A module without its weights keeps their types and shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from tilework.core.component import Component
from tilework.worker.shared_weights import Form, NoRoom, SharedWeights, digest_of, weights_of

_log = logging.getLogger(__name__)

Read = Callable[[], nn.Module]
"""Reads a component from the directory of its model."""


@dataclass(frozen=True, slots=True, eq=False)
class _Module:
    """The weights of a module of one model, and what they are like."""

    weights: Sequence[Tensor]
    forms: Sequence[Form]


@dataclass(slots=True, eq=False)
class _Known:
    """A component, the file of its weights, and the modules that have it: one of each model with this component."""

    component: Component
    file: str
    read: Read
    modules: list[_Module] = field(default_factory=list)
    is_here: bool = False


class Weights:
    """The components of a worker by digest. Equal ones of several models lie on the device once."""

    def __init__(self, files: SharedWeights) -> None:
        self._files = files
        self._known: dict[str, _Known] = {}

    def add(self, module: nn.Module, read: Read) -> Component:
        """Take over the weights of a module, which lie on the device; it is without them then.

        Components are equal if class, configuration and weights are, wherever they come from.
        """
        weights = weights_of(module)
        forms = [Form.of(one) for one in weights]
        file = digest_of(weights)
        digest = sha256(f"{type(module).__name__} {_configuration(module)} {file}".encode()).hexdigest()[:16]
        known = self._known.get(digest)
        if known is None:
            component = Component(digest, sum(form.num_bytes for form in forms))
            known = self._known[digest] = _Known(component, file, read)
            self._keep(known, weights)
        known.modules.append(_Module(weights, forms))
        _empty(known.modules[-1])
        return known.component

    def has(self, digests: Collection[str]) -> bool:
        return all(self._known[digest].is_here for digest in digests)

    def load(self, digests: Collection[str], forgets: Sequence[str] = ()) -> None:
        """Bring components to the device, but for those of no model here. Where their files have no room, those of
        `forgets` are removed first.

        Raises what reading them raises; then none of them is there.
        """
        try:
            for digest in filter(self._known.__contains__, digests):
                self._load(self._known[digest], [self._known[one].file for one in forgets if one in self._known])
        except BaseException:
            self.drop(digests)
            raise

    def drop(self, digests: Collection[str]) -> None:
        """Give back the memory of components on the device."""
        for digest in filter(self._known.__contains__, digests):
            known = self._known[digest]
            known.is_here = False
            for module in known.modules:
                _empty(module)

    def _load(self, known: _Known, forgets: Sequence[str]) -> None:
        first, *others = known.modules
        if not self._map(known, first):
            weights = weights_of(known.read())
            if not (self._keep(known, weights, forgets) and self._map(known, first)):
                for mine, read, form in zip(first.weights, weights, first.forms, strict=True):
                    mine.data = read.data.clone().to(form.device)
        for other in others:
            for mine, its in zip(other.weights, first.weights, strict=True):
                mine.data = its.data
        known.is_here = True

    def _map(self, known: _Known, module: _Module) -> bool:
        """Let the weights of a module lie in their file; returns whether it is there. Others may remove it any time."""
        try:
            self._files.map(known.file, module.weights, module.forms)
        except FileNotFoundError:
            return False
        return True

    def _keep(self, known: _Known, weights: Sequence[Tensor], forgets: Sequence[str] = ()) -> bool:
        """Keep weights in their file, if need be in the place of the files `forgets` and of those least lately needed.

        False if that cannot be: they are read from the directory of their model each time then.
        """
        try:
            try:
                self._files.keep(known.file, weights)
            except NoRoom:
                self._files.make_room(known.component.num_bytes, forgets)
                self._files.keep(known.file, weights)
        except OSError as error:
            _log.warning("the host keeps no copy of a component of %d bytes: %s", known.component.num_bytes, error)
            return False
        return True


def _configuration(module: nn.Module) -> str:
    """The configuration of a component, without what begins with "_": that says where it was read, and by what."""
    config: Any = getattr(module, "config", {})
    settings = config.to_dict() if hasattr(config, "to_dict") else config
    return repr(sorted((name, repr(value)) for name, value in settings.items() if not name.startswith("_")))


def _empty(module: _Module) -> None:
    for weight, form in zip(module.weights, module.forms, strict=True):
        weight.data = torch.empty(0, dtype=form.dtype, device=form.device)
