"""What a worker refuses to do with an exact request, although no scheduler should ask for it."""

from __future__ import annotations

from tilework.core.wire import Decode, Denoise, Spec


class NotExact(RuntimeError):
    """A work would make the picture of an exact request differ from the stock pipeline's."""


def check_exact(spec: Spec, command: Denoise | Decode) -> None:
    """Raises:
    NotExact: the request is exact, and its steps would run in a group or together with others, or its decode in slices.
    """
    if spec.exact and (way := _inexact_way(command)):
        raise NotExact(f"the request is exact, and would run {way}")


def _inexact_way(command: Denoise | Decode) -> str:
    if isinstance(command, Decode):
        return "in slices" if command.sliced else ""
    if command.group is not None:
        return f"on {len(command.group.devices)} devices"
    return "together with others" if len(command.members) > 1 else ""
