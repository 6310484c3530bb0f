"""Answers of etcd's JSON gateway, checked: no message of another program at its address passes for one of etcd.

Numbers come as texts, and what is zero, false or empty is left out.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import httpx
from pydantic import Base64Bytes, Base64Str, BaseModel, Field, ValidationError, model_validator

from tilework.sets.registry import RegistryLost

_LEASE_IS_GONE = "requested lease not found"
_SHOWN_CHARACTERS = 80


class Header(BaseModel):
    cluster_id: int
    revision: int


class EtcdAnswer(BaseModel):
    """The header that every answer has."""

    header: Header


class Granted(EtcdAnswer):
    ID: int


class _Streamed(EtcdAnswer):
    """A message of a stream."""

    @model_validator(mode="before")
    @classmethod
    def _unwrapped(cls, message: object) -> object:
        return message.get("result") if isinstance(message, dict) else message


class Renewed(_Streamed):
    """The answer to a renewal. `TTL` is that of the lease; 0 if it is gone."""

    TTL: int = 0


class KeyValue(BaseModel):
    """An entry; a deleted entry has only its key and `mod_revision`."""

    key: Base64Str
    mod_revision: int
    create_revision: int = 0
    value: Base64Bytes = b""
    lease: int = 0


class Listed(EtcdAnswer):
    kvs: list[KeyValue] = Field(default_factory=list)


class _RangeResponse(BaseModel):
    kvs: list[KeyValue] = Field(default_factory=list)


class _ResponseOp(BaseModel):
    response_range: _RangeResponse = Field(default_factory=_RangeResponse)


class Written(EtcdAnswer):
    """The answer of a transaction; `found` are the entries that its reads have found."""

    succeeded: bool = False
    responses: list[_ResponseOp] = Field(default_factory=list)

    @property
    def found(self) -> list[KeyValue]:
        return [one for part in self.responses for one in part.response_range.kvs]


class Event(BaseModel):
    kv: KeyValue
    type: Literal["PUT", "DELETE"] = "PUT"


class Watched(_Streamed):
    """Changes of a watch. The first message has none, nor has the last, by which etcd has `canceled` the watch."""

    canceled: bool = False
    events: list[Event] = Field(default_factory=list)


class _Problem(BaseModel):
    """The refusal of a call by etcd."""

    error: str
    code: int


Kind = TypeVar("Kind", bound=EtcdAnswer)


class LeaseGone(Exception):
    """The lease of a call has ended, or never existed."""


def read(kind: type[Kind], answer: httpx.Response, line: str) -> Kind:
    """Parse the first line of an answer as one of this kind.

    Raises:
        LeaseGone: etcd says so.
        RegistryLost: etcd refuses the call, or the address answers and is no etcd.
    """
    is_json = answer.headers.get("content-type", "").partition(";")[0] == "application/json"
    try:
        if is_json and answer.status_code == httpx.codes.OK:
            return kind.model_validate_json(line)
        problem = _Problem.model_validate_json(line if is_json else "")
    except ValidationError:
        shown = line.strip()[:_SHOWN_CHARACTERS]
        raise RegistryLost(
            f"{answer.url} is no etcd: it answers HTTP {answer.status_code} {shown!r}; give the addresses of etcd's "
            "members as the registry, and no proxy that answers in their place"
        ) from None
    if _LEASE_IS_GONE in problem.error:
        raise LeaseGone
    raise RegistryLost(f"{answer.url}: HTTP {answer.status_code} {problem.error}")
