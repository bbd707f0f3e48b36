"""The explorer's server."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import panel as pn
from panel.io.server import WSHandler, get_server
from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher, Rule
from tornado.web import Application, RequestHandler

from nlflow.desk.explorer import address
from nlflow.desk.explorer.denoise_tab import DenoiseTab
from nlflow.desk.explorer.desk import Desk, Tab
from nlflow.desk.explorer.flow_tab import FlowTab
from nlflow.desk.explorer.layers_tab import LayersTab
from nlflow.desk.explorer.layers_view import LayersFile
from nlflow.desk.explorer.proposition_tab import PropositionTab
from nlflow.desk.explorer.sources import Source
from nlflow.desk.explorer.texts import refused
from nlflow.desk.explorer.uploads import Limits
from nlflow.desk.explorer.widgets import THEME, Part, TabBar, markup
from nlflow.desk.explorer.worker import Worker
from nlflow.errors import InputError

# ---- requests


_SERVED = re.compile(r"/|/ws|/favicon\.ico|/static/.+")
_ODD = re.compile(r"[\x00-\x1f\x7f\\]|(^|/)\.\.(/|$)")
_SHOWN = 100  # characters of a header in a message
_HTTP = 80  # the port that stands in no address


def hosts_of(names: Iterable[str], port: int) -> frozenset[str]:
    written = {bracketed(name) for name in names}
    found = {f"{name}:{port}" for name in written}
    return frozenset(found | written if port == _HTTP else found)


def bracketed(name: str) -> str:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower()
    return f"[{address.compressed}]" if address.version == 6 else str(address)


class Keys:
    """What opens the page: a token in the address, tickets for one use, and the cookie of a browser."""

    def __init__(self, port: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self._tickets: set[str] = set()
        self._cookie = secrets.token_urlsafe(24)
        self._name = f"nlflow-explorer-{port}"  # a browser does not keep cookies apart by port

    def ticket(self) -> str:
        """Return a token for one use, since all users can read the command line of a browser."""
        made = secrets.token_urlsafe(24)
        self._tickets.add(made)
        return made

    def bring(self, request: HTTPServerRequest) -> bool:
        cookie = request.cookies.get(self._name)
        return cookie is not None and _same(cookie.value, self._cookie)

    def open(self, token: str) -> str:
        used = next((one for one in self._tickets if _same(token, one)), None)
        if used is None and not _same(token, self.token):
            return ""
        self._tickets.discard(used or "")
        return f"{self._name}={self._cookie}; Path=/; HttpOnly; SameSite=Lax"


def _same(given: str, kept: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), kept.encode())


def _close_to_others(application: Application, hosts: frozenset[str], keys: Keys) -> None:
    """Have an application answer its own pages alone, before any of its handlers sees a request.

    The header ``Host`` is checked against DNS rebinding. Other users of the machine reach the port too: hence the
    token.
    """
    application.add_handlers(r".*", [Rule(_Unwanted(hosts, keys), _Refusal)])


class _Unwanted(Matcher):
    def __init__(self, hosts: frozenset[str], keys: Keys) -> None:
        self._hosts, self._keys = hosts, keys
        self._origins = frozenset(f"http://{host}" for host in hosts)

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        why = self._forbidden(request)
        if why:
            return _answer(HTTPStatus.FORBIDDEN, why)
        if not _is_served(request.path):
            return _answer(
                HTTPStatus.NOT_FOUND,
                "got a path that is no part of the page, expected /; open the address that the command printed",
            )
        tokens = request.query_arguments.get("token", [])
        asked = request.method == "GET" and request.path == "/" and len(tokens) == 1
        cookie = self._keys.open(tokens[0].decode("latin-1")) if asked else ""
        if cookie:  # so that the token does not stay in the bar of the browser, and in its history
            return _answer(HTTPStatus.SEE_OTHER, "the page is at /", {"Set-Cookie": cookie, "Location": "/"})
        if not self._keys.bring(request):
            return _answer(
                HTTPStatus.FORBIDDEN,
                "token: got none that is right, expected that of this server; open the whole address that the command "
                "printed, with ?token=",
            )
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


def _answer(status: HTTPStatus, why: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    return {"target_kwargs": {"status": status, "why": why, "headers": headers or {}}}


def _listed(values: list[str]) -> str:
    return " and ".join(repr(value[:_SHOWN]) for value in values) or "none"


def _is_served(path: str) -> bool:
    try:
        meant = unquote(path, errors="strict")
    except UnicodeDecodeError:
        return False
    return _SERVED.fullmatch(path) is not None and _ODD.search(meant) is None


class _Refusal(RequestHandler):
    def initialize(self, status: HTTPStatus, why: str, headers: dict[str, str]) -> None:
        self._refused = status, why, headers

    def prepare(self) -> None:
        status, why, headers = self._refused
        self.set_status(status)
        for name, value in ({"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"} | headers).items():
            self.set_header(name, value)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.finish(f"nonlocal explore: {why}\n")


class _Messages(WSHandler):  # type: ignore[misc]  # Panel has no types
    """The websocket. A message that cannot be read ends it; with Bokeh's codes Tornado would not close it."""

    def _internal_error(self, message: str) -> None:
        self.close(1011, "a message failed")

    def _protocol_error(self, message: str) -> None:
        self.close(1002, "a message cannot be read")


def _end_at_malformed_messages(application: Application) -> None:
    """Have an application close a websocket whose message cannot be read."""
    for rule in application.wildcard_router.rules:
        if rule.target is WSHandler:
            rule.target = _Messages
    for name in ("bokeh.server.views.ws", "bokeh.server.protocol_handler", "bokeh.protocol"):
        logging.getLogger(name).addFilter(_is_fault_of_ours)


# ---- the page; each tab starts to compute when it is first shown


#: An addition to the page's head: its colours; and without the second line telephones show the page for wide screens.
_HEAD = f"""{{% block postamble %}}
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{THEME}</style>
{{% endblock %}}"""
_TABS = ("Denoise", "Flow", "Proposition 1", "Layers")


@dataclass(frozen=True)
class Contents:
    """What a page shows."""

    source: Source  # to denoise
    layers: LayersFile | None = None
    limits: Limits = field(default_factory=Limits)  # of uploads


def build(contents: Contents, worker: Worker) -> Any:
    if pn.state.curdoc is not None:
        pn.state.curdoc.template = _HEAD
        # The page says by itself that the server has gone. A new server knows nothing of an old page.
        pn.state.curdoc.config.update(reconnect_session=False, notify_connection_status=False)
    loop = None if pn.state.curdoc is None else asyncio.get_running_loop()
    desk = Desk(worker, contents.limits, pn.state.curdoc, loop)
    pn.state.on_session_destroyed(lambda context: desk.close())
    tabs: list[Tab] = [
        DenoiseTab(desk, contents.source),
        FlowTab(desk),
        PropositionTab(desk),
        LayersTab(desk, contents.layers),
    ]
    first = len(tabs) - 1 if contents.layers is not None and contents.source.built_in else 0
    # All tabs are part of the page from the start: a part that is added later can miss changes.
    places = [pn.Column(tab.panel, sizing_mode="stretch_width") for tab in tabs]
    seen, loaded, arrived = first, False, False

    def look(number: Any) -> None:
        nonlocal seen
        if number in range(len(tabs)):
            seen = number
        for other, place in enumerate(places):
            place.visible = other == seen
        if loaded and arrived and not tabs[seen].started:
            tabs[seen].started = True
            tabs[seen].start()
        tell()

    def tell(_: Any = None) -> None:
        if loaded and arrived:
            bar.show(chosen=seen, address=address.written(tabs[seen].name, tabs[seen].words()))

    def arrive(text: str) -> None:
        """Show what the page's address says; the page sends it once when it opens."""
        nonlocal arrived
        found = address.read(text, [tab.name for tab in tabs])
        number = next((k for k, tab in enumerate(tabs) if tab.name == found.tab), seen)
        faults = [*found.faults, *(tabs[number].restore(found.words) if found.words else ())]
        tabs[number].started &= not found.words
        tabs[number].refusal.object = refused(*faults)
        arrived = True
        look(number)

    def load() -> None:
        nonlocal loaded
        loaded = True
        look(seen)

    bar = TabBar(lambda data: arrive(str(data["address"])) if isinstance(data, dict) else look(data),
                 names=list(_TABS), chosen=first, address="")  # fmt: skip
    for part in (one for tab in tabs for one in (*tab.controls.values(), tab.status)):
        part.param.watch(tell, ["shown" if isinstance(part, Part) else "value", "visible"])
    look(first)
    # Some changes are lost while the page loads, so the first tab starts a moment later.
    pn.state.onload(lambda: desk.later(load))
    title = markup("<h1>nonlocal explore</h1>")
    title.sizing_mode, bar.styles = None, {"flex": "1 1 280px"}
    return pn.Column(
        pn.FlexBox(title, bar, gap="0 24px", sizing_mode="stretch_width"),
        *places,
        sizing_mode="stretch_width",
        styles={"max-width": "2400px", "margin": "0 auto", "padding": "8px 12px"},
    )


# ---- the server


#: Bytes by which a message may be longer than the upload in it.
_ROOM = 2**20


class Running:
    """A running server."""

    def __init__(self, server: Any, worker: Worker, address: str, keys: Keys) -> None:
        self._server, self._worker, self._address, self._keys = server, worker, address, keys
        self.url = f"{address}?token={keys.token}"

    def url_for_once(self) -> str:
        return f"{self._address}?token={self._keys.ticket()}"

    def wait(self) -> None:
        self._server.io_loop.start()

    def stop(self) -> None:
        self._server.stop()
        self._worker.close()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def start(contents: Contents, *, host: str = "127.0.0.1", port: int = 0) -> Running:
    """Serve the page, for port 0 at any free one; `InputError` for an address or port that cannot be used."""
    # Loaded here, not when the computing thread first needs it: CPython 3.11 fails where two threads parse at a time.
    import skimage.metrics  # noqa: F401

    try:  # here, since Tornado would leave a socket open where it fails
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise _refused(error, host, port) from error
    worker = Worker()
    # Messages hold uploads as base64; other messages are short.
    longest = contents.limits.content * 4 // 3 + _ROOM
    server = get_server(
        {"/": lambda: build(contents, worker)},
        port=port,
        address=host,
        title="nonlocal explore",
        location=False,  # Panel cannot read an address in brackets, and the page does not need it
        show=False,
        start=False,
        static_dirs={},
        websocket_max_message_size=longest,
        http_server_kwargs={"max_buffer_size": longest, "max_body_size": _ROOM},
    )
    hosts = hosts_of({host, "localhost", "127.0.0.1", "::1", *(() if is_loopback(host) else _names())}, server.port)
    # Bokeh has no public name for its application, and no argument for the origin of an address in brackets.
    application = server._tornado
    keys = Keys(server.port)
    _close_to_others(application, hosts, keys)
    application.websocket_origins.update(hosts)
    logging.getLogger("bokeh").setLevel(logging.ERROR)
    _end_at_malformed_messages(application)
    server.start()
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return Running(server, worker, f"http://{bracketed(shown)}:{server.port}/", keys)


def _is_fault_of_ours(record: logging.LogRecord) -> bool:
    """Tell whether a message of the websocket has failed in a part of the page.

    A message that Bokeh cannot read ends its session, as it should, and says nothing about the server.
    """
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("nlflow."):
            return True
        trace = trace.tb_next
    return False


def _refused(error: OSError, host: str, port: int) -> InputError:
    if error.errno == errno.EADDRINUSE:
        return InputError(f"--port: got {port}, which another program uses; choose another, or 0 for any that is free")
    if error.errno == errno.EACCES:
        return InputError(f"--port: got {port}, which only an administrator may use; choose one from 1024 on")
    return InputError(f"--host: got {host!r} ({error.strerror}), expected an address of this machine, as 127.0.0.1")


def _names() -> set[str]:
    name = socket.gethostname()
    found = {name, socket.getfqdn()}
    with suppress(OSError):  # a machine need not know its own name
        found |= {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    return found
