"""`tilework explain`: why a request was served as it was."""

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
from tilework.cli.views.explanation import request_document, summary_document
from tilework.cli.views.explanation_text import print_decisions, print_line, print_request, print_summary
from tilework.control.history import History, PastRequest

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
        str | None, typer.Argument(help="A request or a call: its name, the beginning of it, or a job number.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Ask this running server about UID instead of reading a log.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TILEWORK_API_KEY", help="The server's key. Better set TILEWORK_API_KEY.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show why a request was served as it was: each decision with its reason, each run with its predicted time.

    Without UID: how the requests of the log ended, and why the latest ones were late.
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
    if uid is not None:
        documents = [request_document(history, past) for past in _find(history, uid, log)]
        _print_requests(documents, json)
        return
    if not history.requests:
        raise UserError(f"{log} holds no requests; was anything served?")
    summary = summary_document(history)
    print_json(summary) if json else print_summary(summary, log)


def _print_requests(documents: list[dict[str, Any]], json: bool) -> None:
    """One request as it is; several of a call under the call's name."""
    if json:
        print_json(documents[0] if len(documents) == 1 else {"uid": _call(documents[0]["uid"]), "images": documents})
        return
    for number, document in enumerate(documents):
        if number:
            out.print()
        print_request(document)


def _find(history: History, name: str, log: Path) -> list[PastRequest]:
    """The request of this uid, else of this job number, else the only one, or the only call, whose uid begins so.

    Raises UserError.
    """
    by_uid = {past.request.uid: past for past in history.requests}
    if name in by_uid:
        return [by_uid[name]]
    if name.isdecimal():
        for past in history.requests:
            if past.job_id == int(name):
                return [past]
    begun = [uid for uid in by_uid if uid.startswith(name)]
    calls = {(_call(uid), by_uid[uid].request.arrival_ns) for uid in begun}  # Images of a call arrive together.
    if len(begun) == 1 or (len(calls) == 1 and _call(begun[0]).startswith(name)):
        return [by_uid[uid] for uid in begun]
    if begun:
        more = ", ..." if len(begun) > _NAMED else ""
        raise UserError(f"{len(begun)} requests of {log} begin with {name!r}: {', '.join(begun[:_NAMED])}{more}")
    near = get_close_matches(name, by_uid, n=_NAMED, cutoff=0.5)
    remedy = f"near ones: {', '.join(near)}" if near else f"tilework explain {log} lists the latest ones"
    raise UserError(f"no request of {log} is called {name!r}; {remedy}")


def _call(uid: str) -> str:
    """The name of the call that a request came in: images are called `{call}-{index}`."""
    call, _, index = uid.rpartition("-")
    return call if call and index.isdecimal() else uid


def _ask(url: str, uid: str, api_key: str | None) -> dict[str, Any]:
    """What the server at `url` says of a request. Raises UserError."""
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
    """The message of an OpenAI-style error, or the beginning of the answer."""
    document = _decoded(answer)
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or answer.text[:200])


def _decoded(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None
