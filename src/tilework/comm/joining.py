"""Connection of one member of a group to the others, by Unix sockets in the rendezvous."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import TracebackType

from tilework.core.comm import GroupBroken

_RANK_BYTES = 2


class Joining:
    """Listens at `directory`/member-RANK, connects to lower ranks, and accepts higher ones.

    Nothing here blocks: a listening socket takes a connection before its owner accepts it. Call `advance` until it
    returns True, for as long as you like; then `connections` has a connected socket for each other rank. If the context
    ends with an error, they are closed. Only processes that may write to the directory can join.
    """

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.connections: dict[int, socket.socket] = {}
        self._rank, self._size = rank, size
        self._unknown: list[socket.socket] = []  # Accepted, but of unknown rank.
        directory.mkdir(exist_ok=True)
        # Addresses are at most 107 bytes long. A path by the descriptor fits wherever the directory is.
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(self._address(rank) + "-soon")
        self._listener.listen(size)
        # The socket listens before it gets its name, so a refused connection means that its owner has gone.
        os.rename(self._address(rank) + "-soon", self._address(rank))

    def __enter__(self) -> Joining:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._listener.close()
        os.close(self._directory)
        for connection in [*self._unknown, *(self.connections.values() if error is not None else ())]:
            connection.close()

    def advance(self) -> bool:
        """Make the connections that are possible now. Return whether all are made.

        Raises:
            GroupBroken: a member came and has gone.
        """
        for rank in range(self._rank):
            if rank not in self.connections:
                self._connect(rank)
        self._accept()
        return len(self.connections) == self._size - 1

    def _connect(self, rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(self._address(rank))
            connection.sendall(self._rank.to_bytes(_RANK_BYTES))
        except FileNotFoundError:  # Not there yet.
            connection.close()
        except OSError as error:
            connection.close()
            raise GroupBroken("a member was lost while it connected") from error
        else:
            self.connections[rank] = connection

    def _accept(self) -> None:
        try:
            while len(self.connections) + len(self._unknown) < self._size - 1:
                self._unknown.append(self._listener.accept()[0])
        except BlockingIOError:
            pass
        for connection in list(self._unknown):
            connection.setblocking(False)
            try:
                said = connection.recv(_RANK_BYTES)
            except BlockingIOError:
                continue
            self._unknown.remove(connection)
            if not said:
                connection.close()
                raise GroupBroken("a member was lost while it connected")
            self.connections[int.from_bytes(said)] = connection

    def _address(self, rank: int) -> str:
        return f"/proc/self/fd/{self._directory}/member-{rank}"
