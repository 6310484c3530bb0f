"""Where a worker begins: a module of its own, so that the process that starts workers needs no torch.

`multiprocessing` asks for the function itself, and then gives the new process no more than its name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from tilework.core.model import Source
from tilework.core.wire.commands import Site
from tilework.ownership.own import ONLY_OURS


def run(connection: socket.socket, sources: Sequence[Source], site: Site) -> None:
    """`worker.process.serve`, which is imported in the new process, where it is there already.

    What the process writes, states and weights, is for no other user to read.
    """
    os.umask(ONLY_OURS)
    from tilework.worker.process import serve

    serve(connection, sources, site)
