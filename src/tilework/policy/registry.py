"""Policies by name. A new policy is a new file in a folder of this package, with a class under `@policy("name")`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import cache
from typing import TypeVar

import tilework.policy
from tilework.core.interfaces import NeedsFuture, Policy

DEFAULT_POLICY = "tilework"


class UnknownPolicy(ValueError):
    """No policy has this name; the message lists those that exist."""


_REGISTRY: dict[str, Callable[[], Policy]] = {}
_EXTRA: set[str] = set()
_KEEPS_POOLS: set[str] = set()
_MAY_FAIL: set[str] = set()
Factory = TypeVar("Factory", bound=Callable[[], Policy])


def policy(
    name: str, *, is_extra: bool = False, keeps_pools: bool = False, may_fail: bool = False
) -> Callable[[Factory], Factory]:
    """Register a policy class (or a function that builds one) under `name`.

    An extra one needs more than the base installation, a package or the bench, and raises UnknownPolicy where that is
    missing. One that keeps pools starts the works of a pipeline only on devices that serve it. One that may fail has
    requests fail that its division of the devices has no room for (`Plan.failures`).
    """

    def register(factory: Factory) -> Factory:
        assert name not in _REGISTRY, f"two policies are called {name}"
        _REGISTRY[name] = factory
        _EXTRA.update({name} if is_extra else ())
        _KEEPS_POOLS.update({name} if keeps_pools else ())
        _MAY_FAIL.update({name} if may_fail else ())
        return factory

    return register


@cache
def _load_all() -> None:
    for module in pkgutil.walk_packages(tilework.policy.__path__, prefix="tilework.policy."):
        importlib.import_module(module.name)


def policy_names() -> list[str]:
    """The policies that every installation can build: what a seed chooses among them is the same everywhere."""
    _load_all()
    return sorted(_REGISTRY.keys() - _EXTRA)


def make_policy(name: str) -> Policy:
    """Build the policy called `name`. Raises UnknownPolicy."""
    _load_all()
    if name not in _REGISTRY:
        close = get_close_matches(name, _REGISTRY, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownPolicy(f"policy {name!r} does not exist; {hint}choose one of {', '.join(policy_names())}")
    return _REGISTRY[name]()


def check_live(name: str) -> None:
    """Raises UnknownPolicy if no policy has this name, or if it needs to know the requests that will come."""
    if isinstance(make_policy(name), NeedsFuture):
        raise UnknownPolicy(
            f"policy {name!r} decides by the requests that will come, so that only a simulation can run it "
            f"(tilework compare); choose another, such as {DEFAULT_POLICY}"
        )


def keeps_pools(name: str) -> bool:
    """Whether a policy starts the works of a pipeline only on devices that serve it."""
    _load_all()
    return name in _KEEPS_POOLS


def may_fail(name: str) -> bool:
    """Whether a policy has requests fail that its division of the devices has no room for."""
    _load_all()
    return name in _MAY_FAIL


def check_pools(name: str, pipelines: Collection[str]) -> None:
    """Raises UnknownPolicy if a policy does not keep pipelines to their devices, and these have some of their own."""
    if pipelines and not keeps_pools(name):
        raise UnknownPolicy(
            f"policy {name!r} gives every device to every model, and {min(pipelines)!r} has devices of its own; choose "
            f"{', '.join(sorted(_KEEPS_POOLS))}, or leave its devices out"
        )
