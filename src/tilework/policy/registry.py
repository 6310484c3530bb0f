"""Policies by name: those that ship, those that installed packages declare, and any class as `module:Class`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from tilework.core.policy import Policy
from tilework.distribution import install_lab_command
from tilework.entry_points import NotThere, cause_of, declared_places, load_named
from tilework.policy.traits import NeedsFuture

DEFAULT_POLICY = "tilework"
ENTRY_POINTS = "tilework.policies"
SHIPPED: Mapping[str, str] = {
    DEFAULT_POLICY: "tilework.policy.lookahead.policy:LookaheadPolicy",
    "ddit": "tilework.policy.published.ddit:DDiT",
    "edf": "tilework.policy.published.edf:EarliestDeadlineFirst",
    "fixed-sp1": "tilework.policy.published.fixed:SP1",
    "fixed-sp2": "tilework.policy.published.fixed:SP2",
    "fixed-sp4": "tilework.policy.published.fixed:SP4",
    "fixed-sp8": "tilework.policy.published.fixed:SP8",
    "onepiece": "tilework.policy.published.onepiece.policy:OnePiece",
    "patchedserve": "tilework.policy.published.patchedserve:PatchedServe",
    "tetriserve": "tilework.policy.published.tetriserve.policy:TetriServe",
    "tridentserve": "tilework.policy.published.tridentserve.policy:TridentServe",
}
"""Places, `module:factory`, of the policies that every installation has: a class, or a function without arguments."""
_GIVEN: dict[str, Callable[[], Policy]] = {}
_METHODS = ("urgency_ns", "degrees", "demand", "plan")


class UnknownPolicy(ValueError):
    """No policy has this name, or it cannot be built here; the message says why and names the remedy."""


def policy_names() -> list[str]:
    """Return the policies that can be chosen by name: those that ship, and those that installed packages declare."""
    return sorted(_places())


def register(name: str, factory: Callable[[], Policy]) -> None:
    """Give a policy a name in this process, for a program that varies one; no list of names has it."""
    assert name not in {*_GIVEN, *_places()}, f"two policies are called {name}"
    _GIVEN[name] = factory


def make_policy(name: str) -> Policy:
    """Build the policy called `name`, or the one at `name` if that is a place, `module:Class`. Raises UnknownPolicy."""
    if name in _GIVEN:
        return _GIVEN[name]()
    place = name if ":" in name else _places().get(name)
    if place is None:
        close = get_close_matches(name, _places(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownPolicy(
            f"policy {name!r} does not exist; {hint}choose one of {', '.join(policy_names())}, or give module:Class"
            f"{_of_the_lab()}"
        )
    policy = _built(name, place)
    if missing := [method for method in _METHODS if not callable(getattr(policy, method, None))]:
        raise UnknownPolicy(
            f"policy {name!r} is a {type(policy).__name__}, which lacks {', '.join(missing)}; "
            "give a class that has the methods of tilework.core.policy.Policy"
        )
    return policy  # type: ignore[no-any-return]


def _built(name: str, place: str) -> Any:
    """Build what is at a place. Raises UnknownPolicy."""
    try:
        factory = load_named(place)
    except NotThere as error:
        raise UnknownPolicy(f"policy {name!r} cannot be built: {error}") from error
    if not callable(factory):
        raise UnknownPolicy(
            f"policy {name!r} is a {type(factory).__name__}; give a class, or a function that builds one"
        )
    try:
        return factory()
    except Exception as error:
        raise UnknownPolicy(
            f"policy {name!r} cannot be built: {cause_of(error)}; it is built without arguments "
            "(functools.partial gives it some)"
        ) from error


def check_live(name: str) -> None:
    """Check that a policy has this name, and decides without the requests that will come. Raises UnknownPolicy."""
    if isinstance(make_policy(name), NeedsFuture):
        raise UnknownPolicy(
            f"policy {name!r} decides by the requests that will come, so that only a simulation can run it "
            f"(tilework compare); choose another, such as {DEFAULT_POLICY}"
        )


def keeps_pools(name: str) -> bool:
    """Return whether a policy runs a pipeline only on devices that serve it."""
    return bool(getattr(make_policy(name), "keeps_pools", False))


def may_fail(name: str) -> bool:
    """Return whether a policy fails requests that its division of the devices has no room for (`Plan.failures`)."""
    return bool(getattr(make_policy(name), "may_fail", False))


def downtime_ns(name: str) -> int:
    """Return for how long a policy closes a device whose placement changes."""
    return int(getattr(make_policy(name), "downtime_ns", 0))


def check_pools(name: str, pipelines: Collection[str]) -> None:
    """Check that a policy keeps pipelines to their own devices, if some have such. Raises UnknownPolicy."""
    if pipelines and not keeps_pools(name):
        raise UnknownPolicy(
            f"policy {name!r} gives every device to every model, and {min(pipelines)!r} has devices of its own; choose "
            f"{', '.join(one for one in policy_names() if _can_keep_pools(one))}, or leave its devices out"
        )


def _can_keep_pools(name: str) -> bool:
    try:
        return keeps_pools(name)
    except UnknownPolicy:
        return False  # A declared one that lacks a package here.


def _places() -> Mapping[str, str]:
    """Return the places of all policies.

    No other package takes over a name that ships: event logs name their policy.
    """
    return {**declared_places(ENTRY_POINTS), **SHIPPED}


def _of_the_lab() -> str:
    """Return a hint at the lab's policies, where the lab is not installed."""
    return "" if declared_places(ENTRY_POINTS) else f"; policies of papers come with {install_lab_command()}"
