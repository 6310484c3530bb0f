"""Messages as bytes by schema: the fields of a dataclass as MessagePack, read by its annotations alone.

Reading a message creates only objects of the types that the codec was made for and of the types of their fields. So
no message can run code, unlike a pickle.

Small messages take an eighth of a pickle's time, and a report with an image of 1024 px three times it, since its pixels
are copied (`python bench/run.py nodes`). So pipes keep their pickles.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from tilework.comm.net.limits import BadMessage, Limits

_HEAD = struct.Struct("!iH")


class Codec:
    """Encodes messages of these types, each with an address: the number of a device, or -1.

    `digest` differs if the types differ in any field: both ends of a connection must have the same.
    """

    def __init__(self, types: Sequence[type]) -> None:
        self._numbers = {one: number for number, one in enumerate(types)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(one) for one in types]
        self._limits = Limits()
        schema = msgspec.json.schema_components(types)
        self.digest = hashlib.sha256(repr(schema).encode()).digest()

    def encode(self, message: object, address: int = -1) -> bytes:
        return _HEAD.pack(address, self._numbers[type(message)]) + self._encoder.encode(message)

    def decode(self, payload: bytes) -> tuple[int, Any]:
        """Return the address and the message. Raises BadMessage if it cannot be read, or holds values out of range."""
        try:
            address, number = _HEAD.unpack_from(payload)
            message = self._decoders[number].decode(memoryview(payload)[_HEAD.size :])
        except (struct.error, IndexError, ValueError, TypeError, msgspec.MsgspecError) as error:
            raise BadMessage(f"a message cannot be read: {error}") from error
        self._limits.check(message)
        return address, message
