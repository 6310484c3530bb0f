"""Entry point of a worker, a separate module, so that the process that starts workers needs no torch.

`multiprocessing` wants the function itself, but gives the new process only its name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from tilework.core.model import Source
from tilework.core.wire.commands import Site
from tilework.ownership.own import ONLY_OURS


def run(connection: socket.socket, sources: Sequence[Source], site: Site) -> None:
    """Run `worker.process.serve`, which is imported in the new process, where it is there already.

    Files that the process writes, states and weights, are readable by no other user.
    """
    os.umask(ONLY_OURS)
    from tilework.worker.process import serve

    serve(connection, sources, site)
