"""What a process is born with; in a module of its own, which imports nothing else that takes time."""

import gc
import socket
import sys

from tilework.comm.messages import send_message

MARKER = "tilework.worker.start.preload"


def report_birth(connection: socket.socket) -> None:
    """Body of a process that says whether it has the marker, and which modules it had to import to serve.

    It has the marker if that is exempt from collections, with all that was imported.
    """
    marker, before = sys.modules.get(MARKER), set(sys.modules)
    import tilework.pipelines.families.flux
    import tilework.pipelines.families.sd
    import tilework.pipelines.families.sd3
    import tilework.pipelines.families.sdxl
    import tilework.worker.process  # noqa: F401  All of them should be here already.

    has_it = getattr(marker, "PRELOADED", False) and gc.get_freeze_count() > 0
    send_message(connection, (has_it, sorted(sys.modules.keys() - before)))
