"""`tilework explain`: shows why a request was served as it was."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from tilework.cli.console import UserError, out, print_json, user_errors
from tilework.cli.logs import is_log, load_history
from tilework.cli.options.common import AsJson, examples
from tilework.cli.views.explanation import (
    RequestNames,
    call_of,
    print_decisions,
    print_line,
    print_request,
    print_summary,
    request_document,
    summary_document,
)
from tilework.control.history import PastRequest

EXAMPLE = examples(
    "tilework explain events.jsonl",
    "tilework explain events.jsonl img-7f3a",
    "tilework explain img-7f3a --url http://127.0.0.1:8000",
)
TIMEOUT_S = 10.0
_NAMED = 5


def command(
    source: Annotated[
        str, typer.Argument(metavar="LOG", help="An event log (serve --log, simulate --events); with --url, the UID.")
    ],
    uid: Annotated[
        str | None,
        typer.Argument(help="A request or a call: its name, a beginning that no other has, or a job number."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Ask this running server about UID instead of reading a log.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TILEWORK_API_KEY", help="The server's key. Better set TILEWORK_API_KEY.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show why a request was served as it was: each decision with its reason, each run with its predicted time.

    Without UID: how the requests of the log ended, and why those late by the most were late.
    """
    if url is not None:
        if uid is not None:
            raise UserError(f"--url asks a server about one request; leave out {uid!r} or --url")
        document = _ask(url, source, api_key)
        if json:
            print_json(document)
            return
        print_line(f"{document['uid']}: {document['status']}")
        print_decisions(document["decisions"])
        return
    log = Path(source)
    with user_errors(OSError):
        if not is_log(log):
            raise UserError(f"{log} is no event log; decisions are in those of serve --log and simulate --events")
    history = load_history(log, quiet=json)
    names = RequestNames(history.requests)
    if uid is not None:
        documents = [request_document(history, past) for past in _find(names, uid, log)]
        _print_requests(documents, names, json)
        return
    if not history.requests:
        raise UserError(f"{log} holds no requests; was anything served?")
    summary = summary_document(history)
    print_json(summary) if json else print_summary(summary, log, names)


def _print_requests(documents: list[dict[str, Any]], names: RequestNames, json: bool) -> None:
    """Print one request as it is, and several of a call under the call's name."""
    if json:
        print_json(documents[0] if len(documents) == 1 else {"uid": call_of(documents[0]["uid"]), "images": documents})
        return
    for number, document in enumerate(documents):
        if number:
            out.print()
        print_request(document, names)


def _find(names: RequestNames, name: str, log: Path) -> list[PastRequest]:
    """Return the request or the images of the call that this name means, see `RequestNames.named`. Raises UserError."""
    if found := names.named(name):
        return found
    if begun := names.begun(name):
        shown = ", ".join(map(names.short, begun[:_NAMED]))
        more = ", ..." if len(begun) > _NAMED else ""
        raise UserError(f"{len(begun)} requests of {log} begin with {name!r}: {shown}{more}")
    near = get_close_matches(name, names.begun(""), n=_NAMED, cutoff=0.5)
    shown = ", ".join(map(names.short, near))
    remedy = f"near ones: {shown}" if near else f"tilework explain {log} lists those late by the most"
    raise UserError(f"no request of {log} is called {name!r}; {remedy}")


def _ask(url: str, uid: str, api_key: str | None) -> dict[str, Any]:
    """Ask the server at `url` about a request. Raises UserError."""
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/requests/{quote(uid, safe='')}/decisions"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = httpx.get(address, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"{address} does not answer: {error}; is the server running?") from error
    if answer.status_code == httpx.codes.OK:
        document = _decoded(answer)
        if isinstance(document, dict) and {"uid", "status", "decisions"} <= document.keys():
            return document
        raise UserError(f"{address} answered something else; is it a tilework server?")
    raise UserError(f"{address} answered {answer.status_code}: {_message(answer)}")


def _message(answer: httpx.Response) -> str:
    """Return the message of an OpenAI-style error, or the beginning of the answer."""
    document = _decoded(answer)
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or answer.text[:200])


def _decoded(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None
