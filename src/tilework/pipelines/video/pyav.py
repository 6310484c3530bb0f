"""PyAV, which reads and writes videos. It is imported when a video is made: images are served without it."""

from __future__ import annotations

from types import ModuleType

from tilework.distribution import install_command
from tilework.pipelines.errors import LibraryMissing


def pyav() -> ModuleType:
    """Return the package `av`.

    Raises:
        LibraryMissing: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise LibraryMissing(
            f"videos are compressed by PyAV, which cannot be imported ({error}); run: {install_command('serve')}"
        ) from error
    return av
