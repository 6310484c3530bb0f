"""An HTTP server on a thread, for what a server under test sends to others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Post = tuple[str, dict[str, str], bytes]
"""Path, headers by their names in lower case, body."""


@contextmanager
def listening(answer: Callable[[Post], tuple[int, Mapping[str, str]]]) -> Iterator[str]:
    """The address of a server that answers each POST with a status and headers, and no body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, own = answer((self.path, headers, self.rfile.read(int(headers["content-length"]))))
            self.send_response(status)
            for name, value in {**own, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
