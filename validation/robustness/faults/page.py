"""The page of ``nonlocal explore`` and strangers: hostile requests and messages, and sessions that were closed."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from validation.robustness.contract import Row
from validation.robustness.faults.processes import Running, Tally
from validation.robustness.faults.victims import CLI

__all__ = ["closed_sessions", "hostile_requests"]

MOST = 50.0  # MiB by which memory may grow
_OWN = "Host: {host}"
_HEAD = '{"msgid": "1", "msgtype": "%s"}'
_READY = {"type": "event", "name": "document_ready", "values": {"type": "map", "entries": []}}


@contextmanager
def _served() -> Iterator[tuple[Running, str, str]]:
    """Run the page; yields the process, the name of its host with the port, and its token."""
    running = Running([*CLI, "explore", "--no-browser", "--port", "0"])
    try:
        if not running.wait_until(lambda: "nonlocal explore: http" in running.said()):
            raise RuntimeError(f"the page does not open: {running.said()}")
        address = urlsplit(running.said().partition("nonlocal explore: ")[2].split()[0])
        yield running, address.netloc, address.query.partition("=")[2]
    finally:
        running.process.terminate()
        running.end(60)


def _ask(host: str, lines: list[str], body: bytes = b"", patience: float = 5.0) -> bytes:
    """Send a request as it is written here, and return what comes; nothing where the server hangs up."""
    name, port = host.rsplit(":", 1)
    found = b""
    with suppress(OSError), socket.create_connection((name, int(port)), timeout=patience) as link:
        link.sendall("\r\n".join([*lines, "", ""]).format(host=host).encode("latin-1") + body)
        while len(found) < 2**20 and (part := link.recv(65536)):
            found += part
            if b"\r\n\r\n" in found and b"101 Switching" in found:
                break
    return found


_SHAKE = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
          "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol: bokeh, x"]  # fmt: skip
_PATHS = ["/", "/?token=", "/?token=x", "/?token=x&token=y", "/static/js/bokeh.min.js", "/favicon.ico", "/metadata",
          "/autoload.js", "/admin", "/../../etc/passwd", "/static/../../../etc/passwd", "/static/%2e%2e/%2e%2e/passwd",
          "/static/%00", "/static/%ff", "//evil.example", "*", "/ws", "/%0d%0aX:y", "/components/os/x/y", "/none",
          "/?bokeh-session-id=x", "/static/extensions/panel/panel.min.js"]  # fmt: skip
_HOSTS = ["evil.example", "", "127.0.0.1", "127.0.0.1.evil.example:80", "0.0.0.0:5006", "evil.example@{host}"]
_ORIGINS = ["http://evil.example", "null", "http://{host}.evil.example", ""]
#: Requests of who has not read the address that the command printed.
REQUESTS: list[tuple[list[str], bytes]] = [
    *(([f"GET {path} HTTP/1.1", _OWN, "Connection: close"], b"") for path in _PATHS),
    *((["GET / HTTP/1.1", f"Host: {host}", "Connection: close"], b"") for host in _HOSTS),
    *((["GET /ws HTTP/1.1", _OWN, f"Origin: {origin}", *_SHAKE], b"") for origin in _ORIGINS),
    (["GET / HTTP/1.1", _OWN, _OWN, "Connection: close"], b""),
    (["GET / HTTP/1.1", _OWN, "Cookie: nlflow-explorer-5006=x", "Connection: close"], b""),
    (["GET / HTTP/1.1", _OWN, "Cookie: \xff=\xfe", "Connection: close"], b""),
    (["GET / HTTP/1.1", _OWN, "X-Long: " + "x" * 70000, "Connection: close"], b""),
    (["GET / HTTP/9.9", _OWN], b""),
    (["NONE / HTTP/1.1", _OWN, "Connection: close"], b""),
    (["\x16\x03\x01\x02"], b""),
    (["POST / HTTP/1.1", _OWN, "Content-Length: 3", "Connection: close"], b"abc"),
    (["POST / HTTP/1.1", _OWN, "Content-Length: -1", "Connection: close"], b""),
    (["POST / HTTP/1.1", _OWN, "Content-Length: 99999999999", "Connection: close"], b"x"),
    (["POST / HTTP/1.1", _OWN, "Transfer-Encoding: chunked", "Connection: close"], b"zz\r\n"),
    (["POST / HTTP/1.1", _OWN, "Content-Length: 1", "Transfer-Encoding: chunked", "Connection: close"], b"0\r\n\r\n"),
]
#: Messages to the websocket, in parts, of a page that is the server's own: a browser that was taken over.
MESSAGES: list[tuple[str | bytes, ...]] = [
    ("",), ("{}",), ("null",), ("[1]",), (b"\xff\xfe",), ("{",), ("[" * 5000,), ('{"msgid": 1}', "{}", "{}"),
    (_HEAD % "PATCH-DOC", "{}", "{}"), (_HEAD % "PATCH-DOC", "{}", '{"events": 3}'), (_HEAD % "NONE", "{}", "{}"),
    (_HEAD % "PULL-DOC-REQ", "{}", "[]"), (_HEAD % "EVENT", "{}", "{}"), (_HEAD % "PUSH-DOC", "{}", '{"doc": {}}'),
    (_HEAD % "PATCH-DOC", "{}", '{"events": [{"kind": "ModelChanged", "model": {"id": "p0"}, "attr": "x", "new": 1}]}'),
    (_HEAD % "PATCH-DOC", "{}", '{"events": [{"kind": "RootRemoved", "model": {"id": "p1"}}]}'),
    (_HEAD % "PATCH-DOC", "{}", '{"events": [{"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": 1}]}'),
    ('{"msgid": "1", "msgtype": "PATCH-DOC", "num_buffers": 1e9}', "{}", "{}", "{}", b"x"),
]  # fmt: skip


def _page(host: str, cookie: str) -> bytes:
    return _ask(host, ["GET / HTTP/1.1", _OWN, f"Cookie: {cookie}", "Connection: close"], patience=60)


class _Socket:
    """A websocket of a page, without a browser."""

    def __init__(self, host: str, cookie: str) -> None:
        page = _page(host, cookie).decode()
        token = page.partition('"token":')[2].split('"')[1]
        name, port = host.rsplit(":", 1)
        self.link = socket.create_connection((name, int(port)), timeout=60)
        lines = ["GET /ws HTTP/1.1", f"Host: {host}", f"Origin: http://{host}", f"Cookie: {cookie}", *_SHAKE[:-1],
                 f"Sec-WebSocket-Protocol: bokeh, {token}", "", ""]  # fmt: skip
        self.link.sendall("\r\n".join(lines).encode())
        self.heard = self.link.recv(4096)

    def send(self, part: str | bytes) -> None:
        """Send one frame, masked as those of browsers are."""
        data = part.encode() if isinstance(part, str) else part
        size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
        mask = os.urandom(4)
        kept = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
        self.link.sendall(bytes([0x81 if isinstance(part, str) else 0x82]) + size + mask + kept)

    def listen(self, seconds: float) -> None:
        """Take what comes for a while, or until the server hangs up."""
        end = time.monotonic() + seconds
        self.link.settimeout(0.2)
        while time.monotonic() < end:
            try:
                if not self.link.recv(2**16):
                    return
            except TimeoutError:
                continue
            except OSError:
                return


def _cookie(host: str, token: str) -> str:
    answer = _ask(host, [f"GET /?token={token} HTTP/1.1", _OWN, "Connection: close"]).decode()
    return answer.partition("Set-Cookie: ")[2].partition(";")[0]


def hostile_requests(folder: Path) -> Row:
    """Send requests of strangers and messages that cannot be read: no page is given, and nothing fails."""
    folder.mkdir(parents=True)
    tally = Tally("hostile requests and messages, nonlocal explore", folder)
    with _served() as (running, host, token):
        for lines, body in REQUESTS:
            answer = _ask(host, lines, body)
            given = b" 200 " in answer[:20] or b" 101 " in answer[:20] or b"root:" in answer or b"<script" in answer
            good = tally.note(f"{lines[:2]}: {answer[:200]!r}" if given else None)
            tally.outcomes["refused"] += good
        cookie = _cookie(host, token)
        for parts in MESSAGES:
            page = _Socket(host, cookie)
            with suppress(OSError):
                for part in parts:
                    page.send(part)
            page.listen(1)
            page.link.close()
            tally.outcomes["ended its session quietly"] += tally.note(
                None if b" 101 " in page.heard else f"no websocket: {page.heard[:100]!r}"
            )
        alive = _page(host, cookie)
        tally.note(None if b" 200 " in alive[:20] else "the server answers its own page no more")
        said = running.said()
    loud = next((word for word in ("Traceback", "ERROR", "Error") if word in said), None)
    tally.note(None if loud is None else f"the server said {said[-600:]}")
    return tally.row(len(REQUESTS) + len(MESSAGES))


def closed_sessions(count: int, folder: Path) -> Row:
    """Open and close pages, each of which computes its first result; memory is to return to what it was."""
    folder.mkdir(parents=True)
    tally = Tally(f"{count} closed sessions, nonlocal explore", folder)
    looks = []
    with _served() as (running, host, token):
        cookie, process = _cookie(host, token), psutil.Process(running.process.pid)
        for number in (30, count):  # the first load libraries and fill caches; some are closed before they compute
            for _ in range(number):
                page = _Socket(host, cookie)
                events = {"events": [{"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": _READY}]}
                for part in (_HEAD % "PULL-DOC-REQ", "{}", "{}", _HEAD % "PATCH-DOC", "{}", json.dumps(events)):
                    page.send(part)
                page.listen(1.5)
                page.link.close()
            least = float("inf")
            for _ in range(9):  # sessions are kept for a while
                time.sleep(10)
                least = min(least, process.memory_info().rss / 2**20)
            looks.append((least, process.num_fds(), process.num_threads()))
    before, after = looks
    for name, was, now, most in zip(("MiB", "open files", "threads"), before, after, (MOST, 0, 0), strict=True):
        tally.note(None if now - was <= most else f"{name}: {was:.1f} before, {now:.1f} after")
    tally.outcomes["left nothing behind"] += count * (not tally.wrong)
    return tally.row(count, before=list(before), after=list(after))
