"""The handshake by which two ends of a connection check that they have the same token and message types.

Neither sends the token: each proves that it knows it, by a keyed hash of random numbers that both have drawn. Later
messages are neither signed nor encrypted, so the network between nodes must be trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from struct import Struct
from typing import NoReturn

from tilework.comm.net.frames import BadFrame, frame, read_frame

_NONCE_BYTES = 16
_PROOF_BYTES = 32
_EPOCH = Struct("!I")
_MOST_BYTES = 128
TIMEOUT_S = 5.0
_OTHER_TOKEN = (
    "it has another token; give both the same TILEWORK_CLUSTER_TOKEN, or none, and run both as one user of one machine"
)
_OTHER_MESSAGES = "it speaks of other messages; install the same version of Tilework on all nodes"
_REFUSALS = {b"token": _OTHER_TOKEN, b"messages": _OTHER_MESSAGES}
"""Answers to a connection that is not admitted, and their meaning."""


class Refused(ConnectionError):
    """The other end does not know the token, or has another version; the message says which."""


async def admit(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, digest: bytes, epoch: int
) -> None:
    """Check the other end of a new connection, and send it the epoch. Raises Refused, OSError, TimeoutError."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    async with asyncio.timeout(TIMEOUT_S):
        writer.writelines(frame(ours, 0))
        answer = await _answer(reader, _NONCE_BYTES + _PROOF_BYTES + len(digest))
        theirs = answer[:_NONCE_BYTES]
        proof = answer[_NONCE_BYTES : _NONCE_BYTES + _PROOF_BYTES]
        if not hmac.compare_digest(proof, _proof(token, b"joins", ours, theirs)):
            await _refuse(writer, b"token")
        if answer[_NONCE_BYTES + _PROOF_BYTES :] != digest:
            await _refuse(writer, b"messages")
        writer.writelines(frame(_proof(token, b"admits", ours, theirs) + _EPOCH.pack(epoch), 0))
        await writer.drain()


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, digest: bytes) -> int:
    """Prove to the accepting end that this end may join; return the epoch. Raises Refused, OSError, TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S):
        theirs = await _answer(reader, _NONCE_BYTES, "too many agents connect, or it is no port for agents")
        ours = secrets.token_bytes(_NONCE_BYTES)
        writer.writelines(frame(ours + _proof(token, b"joins", theirs, ours) + digest, 0))
        answer = await _answer(reader, _PROOF_BYTES + _EPOCH.size)
        if not hmac.compare_digest(answer[:_PROOF_BYTES], _proof(token, b"admits", theirs, ours)):
            raise Refused(_OTHER_TOKEN)
        (epoch,) = _EPOCH.unpack(answer[_PROOF_BYTES:])
        return int(epoch)


async def _refuse(writer: asyncio.StreamWriter, why: bytes) -> NoReturn:
    """Tell the other end why it is not admitted. This reveals nothing new: it knows what it sent."""
    writer.writelines(frame(why, 0))
    await writer.drain()
    raise Refused(_REFUSALS[why])


async def _answer(reader: asyncio.StreamReader, num_bytes: int, why: str = "it has just ended") -> bytes:
    """Return the other end's answer; `why` is the likely reason if it closes the connection."""
    answer = await read_frame(reader, 0, _MOST_BYTES)
    if answer is None:
        raise ConnectionResetError(f"it closed the connection: {why}")
    if answer in _REFUSALS:
        raise Refused(_REFUSALS[answer])
    if len(answer) != num_bytes:
        raise BadFrame(f"a greeting has {len(answer)} bytes, not {num_bytes}")
    return answer


def _proof(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token, role + first + second, hashlib.sha256).digest()
