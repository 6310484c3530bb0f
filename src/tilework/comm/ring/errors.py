"""Errors of a ring."""

from __future__ import annotations


class RingError(RuntimeError):
    """Base of all errors of a ring."""


class RingClosed(RingError):
    """The other end is gone: the consumer closed the ring or ended, or this end was closed."""


class RingFull(RingError):
    """No room became free by the deadline. Nothing was sent; send again later, or make a ring of more bytes."""


class RingCorrupted(RingError):
    """The memory holds words that no producer following the protocol writes. The ring cannot be used any more."""


class VerbFailed(RingError):
    """A verb could not be carried out. Whether a put or a compare-and-swap took place is unknown."""


class VerbTimeout(VerbFailed):
    """A verb was not done by its deadline."""
