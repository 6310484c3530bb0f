"""How two ends of a connection make sure that both know the same token and speak of the same messages.

Neither sends the token: each proves that it knows it, by a keyed hash of numbers that both have drawn. What is sent
later is neither signed nor secret, so the network between nodes must be trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from struct import Struct

from tilework.comm.net.frames import BadFrame, frame, read_frame

_NONCE_BYTES = 16
_PROOF_BYTES = 32
_EPOCH = Struct("!I")
_MOST_BYTES = 128
TIMEOUT_S = 5.0
_OTHER_TOKEN = (
    "it does not know the token; give both the same TILEWORK_CLUSTER_TOKEN, or run both as one user of one machine"
)


class Refused(ConnectionError):
    """The other end does not know the token, or has another version; the message says which."""


async def admit(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, digest: bytes, epoch: int
) -> None:
    """Check who has connected, and tell it the epoch. Raises Refused, BadFrame, TimeoutError."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    async with asyncio.timeout(TIMEOUT_S):
        writer.writelines(frame(ours, 0))
        answer = await _answer(reader, _NONCE_BYTES + _PROOF_BYTES + len(digest))
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES : _NONCE_BYTES + _PROOF_BYTES]
        if not hmac.compare_digest(proof, _proof(token, b"joins", ours, theirs)):
            raise Refused(_OTHER_TOKEN)
        if answer[_NONCE_BYTES + _PROOF_BYTES :] != digest:
            raise Refused("it speaks of other messages; install the same version of Tilework on all nodes")
        writer.writelines(frame(_proof(token, b"admits", ours, theirs) + _EPOCH.pack(epoch), 0))
        await writer.drain()


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, digest: bytes) -> int:
    """Introduce oneself to the end that was connected to; returns the epoch. Raises Refused, BadFrame, TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S):
        theirs = await _answer(reader, _NONCE_BYTES)
        ours = secrets.token_bytes(_NONCE_BYTES)
        writer.writelines(frame(ours + _proof(token, b"joins", theirs, ours) + digest, 0))
        answer = await _answer(reader, _PROOF_BYTES + _EPOCH.size)
        if not hmac.compare_digest(answer[:_PROOF_BYTES], _proof(token, b"admits", theirs, ours)):
            raise Refused(_OTHER_TOKEN)
        (epoch,) = _EPOCH.unpack(answer[_PROOF_BYTES:])
        return int(epoch)


async def _answer(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    answer = await read_frame(reader, 0, _MOST_BYTES)
    if answer is None:
        raise Refused("it closed the connection: it has another token or version, is of another user, or has no place")
    if len(answer) != num_bytes:
        raise BadFrame(f"a greeting has {len(answer)} bytes, not {num_bytes}")
    return answer


def _proof(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token, role + first + second, hashlib.sha256).digest()
