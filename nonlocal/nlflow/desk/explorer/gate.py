"""The requests that the explorer's server answers: those to its own names, from its own pages, for parts of the page.

Another site can let its name point to 127.0.0.1 after its page was loaded; the browser then takes that page for one of
this server (DNS rebinding). The header ``Host`` still holds the site's name, and no page can change it, so
it is checked.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher, Rule
from tornado.web import Application, RequestHandler

_SERVED = re.compile(r"/|/ws|/favicon\.ico|/static/.+")
_ODD = re.compile(r"[\x00-\x1f\x7f\\]|(^|/)\.\.(/|$)")
_SHOWN = 100  # characters of a header in a message
_HTTP = 80  # the port that stands in no address


def hosts_of(names: Iterable[str], port: int) -> frozenset[str]:
    """Return what the header ``Host`` may be for a server of these names at a port, in lower case."""
    written = {bracketed(name) for name in names}
    found = {f"{name}:{port}" for name in written}
    return frozenset(found | written if port == _HTTP else found)


def bracketed(name: str) -> str:
    """Return a name as it stands in an address, in the form that browsers give it."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower()
    return f"[{address.compressed}]" if address.version == 6 else str(address)


def close_to_others(application: Application, hosts: frozenset[str]) -> None:
    """Have an application answer its own pages alone, before any of its handlers sees a request.

    Refused with 403 and a line of plain text are a ``Host`` that is none of `hosts`, missing or there more than once,
    an ``Origin`` that is no page of theirs (for the websocket none, too), and sessions that a request brings along.
    What is no part of the page gets 404, and so does a path that leads out of its folder or holds control characters.
    """
    application.add_handlers(r".*", [Rule(_Unwanted(hosts), _Refusal)])


class _Unwanted(Matcher):
    """Matches the requests that are refused."""

    def __init__(self, hosts: frozenset[str]) -> None:
        self._hosts = hosts
        self._origins = frozenset(f"http://{host}" for host in hosts)

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        why = self._forbidden(request)
        if why:
            return {"target_kwargs": {"status": HTTPStatus.FORBIDDEN, "why": why}}
        if not _is_served(request.path):
            why = "got a path that is no part of the page, expected /; open the address that the command printed"
            return {"target_kwargs": {"status": HTTPStatus.NOT_FOUND, "why": why}}
        return None

    def _forbidden(self, request: HTTPServerRequest) -> str:
        """Return why a request is not for this server's own page; empty if it is."""
        hosts = [value.lower() for value in request.headers.get_list("Host")]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            remedy = "open the address that the command printed; for another name of this machine start it with --host"
            return (
                f"Host: got {_listed(hosts)}, expected a name and the port that this server was started for; {remedy}"
            )
        origins = [value.lower() for value in request.headers.get_list("Origin")]
        if not self._origins.issuperset(origins) or len(origins) > 1 or (request.path == "/ws" and not origins):
            remedy = "other sites and programs cannot use it; open the address that the command printed"
            return f"Origin: got {_listed(origins)}, expected a page of this server; {remedy}"
        given = [*request.arguments, *request.headers]
        if any(name.lower().startswith("bokeh-") for name in given):
            return "bokeh-: got a session with the request, expected none, since each page gets its own; leave it out"
        return ""


def _listed(values: list[str]) -> str:
    """Return the values of a header for a message."""
    return " and ".join(repr(value[:_SHOWN]) for value in values) or "none"


def _is_served(path: str) -> bool:
    """Tell whether the page is made of what is at a path."""
    try:
        meant = unquote(path, errors="strict")
    except UnicodeDecodeError:
        return False
    return _SERVED.fullmatch(path) is not None and _ODD.search(meant) is None


class _Refusal(RequestHandler):
    """Says why a request is refused, whatever its method."""

    def initialize(self, status: HTTPStatus, why: str) -> None:
        self._refused = status, why

    def prepare(self) -> None:
        status, why = self._refused
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.finish(f"nonlocal explore: {why}\n")
