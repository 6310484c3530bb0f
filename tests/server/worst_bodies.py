"""Requests that take a server as long as can be for their size, and a process that sends them.

As a program it reads names of requests from its input, a line each, and writes the status of each answer.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random
from typing import Any

from PIL import Image

MIB = 1 << 20
SIZE = 63 * MIB
JSON_TYPE = {"Content-Type": "application/json"}
FORM_TYPE = {"Content-Type": "multipart/form-data; boundary=b"}
PIECE = 1 << 18
NEEDED = '"...": 0'
"""Stands for the fields that a route needs."""
OF_ROUTES = {
    "/v1/chat/completions": '"messages": [{"role": "user", "content": "x"}]',
    "/v1/batches": '"input_file_id": "x"',
    "/v1/admin/models": '"path": "x"',
    "/v1/admin/models/x/loras": '"name": "x", "path": "x"',
}
KEY = "key"
GONE = 0
"""The status where the server has closed the connection before all was sent, and its answer is lost."""


@dataclass(frozen=True)
class Worst:
    """A request. The body is made where it is sent. `has_chunks`: it has its own framing in chunks."""

    body: Callable[[], bytes] = bytes
    headers: dict[str, str] = field(default_factory=dict)
    query: str = ""
    has_chunks: bool = False


def of_json(body: Callable[[], bytes], **headers: str) -> Worst:
    return Worst(body, {**JSON_TYPE, **{name.replace("_", "-"): value for name, value in headers.items()}})


def with_text(text: bytes, name: bytes = b"user") -> bytes:
    return b'{%b, "%b": "%b"}' % (NEEDED.encode(), name, text)


def in_chat(message: bytes, count: int) -> bytes:
    return b'{"messages": [%b]}' % b",".join([message] * count)


def member(name: str, value: str) -> bytes:
    """A body with what its route needs, and this."""
    return f'{{{NEEDED}, "{name}": {value}}}'.encode()


def form(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(b"--b\r\n%b\r\n\r\n%b\r\n" % (head.encode(), content) for head, content in parts) + b"--b--\r\n"


def part(name: str, filename: str | None = None) -> str:
    file = "" if filename is None else f'; filename="{filename}"'
    return f'Content-Disposition: form-data; name="{name}"{file}'


def shuffled(seed: int) -> str:
    """A name with the letters of a known one."""
    letters = list("preview_every_s")
    Random(seed).shuffle(letters)
    return "".join(letters)


MANY_HEADERS = {f"a{index}": "" for index in range(2500)}
LONG_HEADERS = {f"a{index}": "b" * 110 for index in range(120)}

JSON_BODIES: dict[str, Worst] = {
    "fields": of_json(
        lambda: member("x", "1")[:-1] + b"".join(b',"field%d":1' % index for index in range(600_000)) + b"}"
    ),
    "values": of_json(lambda: member("user", "[")[:-1] + b"1," * (SIZE // 2) + b"1]}"),
    "values of 1 MiB": of_json(lambda: member("user", "[")[:-1] + b"1," * (MIB // 2 - 99) + b"1]}"),
    "objects": of_json(lambda: member("sigmas", "[" + ",".join(['{"a":1}'] * 4900) + "]")),
    "depth 900": of_json(lambda: member("user", "[" * 900 + "]" * 900)),
    "depth 900 as a text": of_json(
        lambda: member("extra_body", json.dumps('{"seed": ' + "[" * 900 + "]" * 900 + "}")), Idempotency_Key="deep"
    ),
    "depth of 1 MiB": of_json(lambda: member("user", "[" * (MIB - 999))),
    "values as a text": of_json(lambda: member("extra_body", json.dumps("[" + "1," * 300_000 + "1]"))),
    "fields in extra_body": of_json(
        lambda: member("extra_body", json.dumps({f"f{index}": index for index in range(9000)}))
    ),
    "names of the same letters": of_json(
        lambda: member("x", "1")[:-1] + b"".join(b', "%b": 1' % shuffled(seed).encode() for seed in range(190)) + b"}"
    ),
    "long names": of_json(lambda: member("a" * 900_000, "1")),
    "texts": of_json(lambda: member("sigmas", "[" + ",".join(['"\\n\\u0041"'] * 9000) + "]")),
    "long texts": of_json(lambda: member("image", "[" + ",".join([f'"{"x" * 6000}"'] * 9000) + "]")),
    "text": of_json(lambda: with_text(b"A" * SIZE)),
    "text of 1 MiB": of_json(lambda: with_text("é".encode() * 400_000)),
    "escapes": of_json(lambda: with_text(b'\\"' * (SIZE // 2))),
    "quotes": of_json(lambda: b'"' * SIZE),
    "spaces": of_json(lambda: b" " * SIZE),
    "digits": of_json(lambda: member("seed", "[" + ",".join(["9" * 4299] * 200) + "]")),
    "utf-16": of_json(lambda: member("sigmas", "[" + "1," * 100_000 + "1]").decode().encode("utf-16")),
    "half of the head": of_json(lambda: b"{}", Content_Type="application/json;" + ";" * 15_000),
    "with a key": of_json(lambda: with_text(b"A" * (SIZE // 2), b"metadata"), Idempotency_Key="k"),
    "chunks": Worst(lambda: b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n", JSON_TYPE, has_chunks=True),
    "wrong messages": of_json(lambda: in_chat(b"{}", 4900)),
    "wrong parts": of_json(lambda: in_chat(b'{"role":"user","content":[' + b"{}," * 4800 + b"{}]}", 1)),
    "wrong roles": of_json(lambda: in_chat(b'{"role":1,"content":1}', 4000)),
    "many messages": of_json(lambda: in_chat(b'{"role":"user","content":"a b"}', 4000)),
}
FORM_BODIES: dict[str, Worst] = {
    "parts": Worst(lambda: form(*[(part(f"f{index}"), b"1") for index in range(20_000)]), FORM_TYPE),
    "files": Worst(lambda: form(*[(part("image", "f"), b"1")] * 20_000), FORM_TYPE),
    "headers of a part": Worst(lambda: b"--b\r\n" + b"a:\r\n" * MIB, FORM_TYPE),
    "text of a form": Worst(lambda: form((part("prompt"), "é".encode() * (SIZE // 2))), FORM_TYPE),
    "texts of a form": Worst(lambda: form(*[(part(f"f{index}"), b"[" * 5000) for index in range(190)]), FORM_TYPE),
    "list of a form": Worst(lambda: form((part("sigmas"), b"[" + b"1," * 400_000 + b"1]")), FORM_TYPE),
    "lora of a form": Worst(lambda: form((part("lora"), b"[" * 900 + b"]" * 900)), FORM_TYPE),
    "file": Worst(lambda: form((part("prompt"), b"x"), (part("image", "f"), bytes(SIZE))), FORM_TYPE),
    "file of lines": Worst(
        lambda: form((part("prompt"), b"x"), (part("image", "f"), b"\r\n" * (SIZE // 2))), FORM_TYPE
    ),
    "file of boundaries": Worst(lambda: form((part("image", "f"), b"\r\n--\r\n-" * (SIZE // 8))), FORM_TYPE),
    "charset": Worst(
        lambda: form((part("prompt"), b"a-" + b"a" * 900_000)),
        {"Content-Type": "multipart/form-data; boundary=b; charset=punycode"},
    ),
    "options": Worst(form, {"Content-Type": "multipart/form-data" + ';a="' * 3900}),
    "options of a part": Worst(
        lambda: form(*[('Content-Disposition: form-data; name="a"' + ';a*0="' * 600, b"")] * 190), FORM_TYPE
    ),
}
TEXT_FORM_BODIES: dict[str, Worst] = {
    name: Worst(body, {"Content-Type": "application/x-www-form-urlencoded"})
    for name, body in {
        "percents": lambda: b"prompt=" + b"%41" * (SIZE // 3),
        "percents of 1 MiB": lambda: b"prompt=" + b"%41" * (MIB // 3 - 99),
        "pairs": lambda: b"a=1&" * (SIZE // 4),
        "pairs of 1 MiB": lambda: b"a=1&" * (MIB // 4 - 99),
    }.items()
}
HEADS: dict[str, Worst] = {
    "query": Worst(query="a=&" * 5000),
    "percents of a query": Worst(query="limit=" + "%41" * 5000),
    "long value": Worst(query="limit=" + "9" * 15_000),
    "many headers": Worst(headers=MANY_HEADERS),
    "long headers": Worst(headers=LONG_HEADERS),
    "headers of ours": Worst(
        headers={
            "Prefer": "wait=1," * 600,
            "Range": "bytes=" + "0-1," * 600,
            "Accept": "a/b;q=1," * 200,
            "If-Range": '"' * 900,
            "traceparent": "0" * 900,
        }
    ),
}


@cache
def _noise(side: int) -> Image.Image:
    return Image.effect_noise((1024, 1024), 90).convert("RGB").resize((side, side))


def _file(kind: str, *, side: int, mode: str = "RGB", **options: object) -> bytes:
    file, picture = io.BytesIO(), _noise(side).convert(mode)
    if mode == "RGBA":
        picture.putalpha(128)
    picture.save(file, kind, **options)
    return file.getvalue()


def _small_chunks() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    content, chunk = file.getvalue(), b"\x00\x00\x00\x00tEXt" + (0xBF2E2C66).to_bytes(4, "big")
    return content[:33] + chunk * (20 * MIB // 12) + content[33:]


PICTURES: dict[str, Callable[[], bytes]] = {
    "JPEG": lambda: _file("JPEG", side=5760, quality=85),
    "progressive JPEG": lambda: _file("JPEG", side=5760, quality=85, progressive=True),
    "PNG with alpha": lambda: _file("PNG", side=2800, mode="RGBA", compress_level=1),
    "WebP": lambda: _file("WEBP", side=2800, quality=30, method=0),
    "large WebP": lambda: _file("WEBP", side=5760, quality=30, method=0),
    "PNG of chunks": _small_chunks,
    "JPEG of scans": lambda: b"\xff\xd8" + b"\xff\xff" * (11 * MIB),
}


def _picture_body(make: Callable[[], bytes]) -> bytes:
    return of_picture(make())


def of_picture(content: bytes) -> bytes:
    return b'{"prompt": "x", "image": "%b"}' % base64.b64encode(content)


PICTURE_BODIES: dict[str, Worst] = {
    **{name: of_json(partial(_picture_body, make)) for name, make in PICTURES.items()},
    "base64 of 31 MiB": of_json(lambda: of_picture(bytes(23 * MIB))),
    "base64 of lines": of_json(lambda: of_picture(bytes(15 * MIB)).replace(b"AAAA", b"AA\\nAA")),
    "base64 with an early end": of_json(lambda: of_picture(bytes(23 * MIB)).replace(b"AAAA", b"=AAA", 1)),
    "file of a form": Worst(lambda: form((part("prompt"), b"x"), (part("image", "f"), PICTURES["JPEG"]())), FORM_TYPE),
}
ALL = {**JSON_BODIES, **FORM_BODIES, **TEXT_FORM_BODIES, **HEADS, **PICTURE_BODIES}


def in_bytes(method: str, path: str, worst: Worst) -> Iterator[bytes]:
    """The request as it goes over the wire."""
    body = worst.body().replace(NEEDED.encode(), OF_ROUTES.get(path, '"prompt": "x"').encode(), 1)
    query = f"?{worst.query}" if worst.query else ""
    framing = "Transfer-Encoding: chunked" if worst.has_chunks else f"Content-Length: {len(body)}"
    headers = [f"{name}: {value}" for name, value in worst.headers.items()]
    yield "\r\n".join(
        [f"{method} {path}{query} HTTP/1.1", "Host: test", f"Authorization: Bearer {KEY}", framing, *headers, "", ""]
    ).encode()
    view = memoryview(body)
    yield from (bytes(view[start : start + PIECE]) for start in range(0, len(view), PIECE))


def answered(address: tuple[str, int], method: str, pieces: Iterable[bytes]) -> int:
    """The status of the answer, or GONE."""
    with socket.create_connection(address, timeout=120) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # It may answer before it has everything.
            for piece in pieces:
                connection.sendall(piece)
        answer = http.client.HTTPResponse(connection, method=method)
        try:
            answer.begin()
        except (ConnectionError, http.client.HTTPException):
            return GONE
        return answer.status


def batched(address: tuple[str, int], path: str, worst: Worst) -> int:
    """The status with which a batch begins whose only call has this body, once the batch has ended."""
    body = worst.body().replace(NEEDED.encode(), OF_ROUTES.get(path, '"prompt": "x"').encode(), 1)
    call = b'{"custom_id": "a", "method": "POST", "url": "%b", "body": %b}' % (path.encode(), body)
    connection = http.client.HTTPConnection(*address, timeout=120)

    def ask(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        connection.request(method, path, body, {"Authorization": f"Bearer {KEY}"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    with closing(connection):
        file = form((part("purpose"), b"batch"), (part("file", "f"), call))
        made: dict[str, object] = {"input_file_id": ask("POST", "/v1/files", file, FORM_TYPE)[1]["id"]}
        made |= {"endpoint": path, "completion_window": "24h"}
        status, batch = ask("POST", "/v1/batches", json.dumps(made).encode(), JSON_TYPE)
        while batch.get("status") in ("validating", "in_progress", "finalizing"):
            time.sleep(0.01)
            batch = ask("GET", f"/v1/batches/{batch['id']}")[1]
        return status


def main() -> None:
    address = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        method, path, name = line.rstrip("\n").split(" ", 2)
        if method == "BATCH":
            print(batched(address, path, ALL[name]), flush=True)
        else:
            print(answered(address, method, in_bytes(method, path, ALL[name])), flush=True)


if __name__ == "__main__":
    main()
