"""Checks of exact requests: a worker refuses works that would change their images, though no scheduler should ask."""

from __future__ import annotations

from tilework.core.wire.commands import Execute
from tilework.core.wire.spec import Spec


class NotExact(RuntimeError):
    """A work would make the image of an exact request differ from the stock pipeline's."""


def check_exact(spec: Spec, command: Execute) -> None:
    """Check that a work keeps an exact request exact.

    Raises:
        NotExact: the request is exact, and would run in a group, together with others, or in slices.
    """
    if spec.exact and (way := _inexact_way(command)):
        raise NotExact(f"the request is exact, and would run {way}")


def _inexact_way(command: Execute) -> str:
    if command.sliced:
        return "in slices"
    if command.group is not None:
        return f"on {len(command.group.devices)} devices"
    return "together with others" if len(command.members) > 1 else ""
