"""The explorer's server: who may connect, what it takes, how it begins and ends."""

from __future__ import annotations

import asyncio
import base64
import functools
import http.client
import io
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from typer.testing import CliRunner

from nlflow import InputError
from nlflow.desk.commands import main as cli
from nlflow.desk.explorer import denoising_view, server, uploads
from nlflow.desk.explorer.sources import Source, example
from nlflow.desk.formats.media import Media
from tests.explorer import serving

pytest.importorskip("panel")
tornado = pytest.importorskip("tornado.websocket")

from nlflow.desk.explorer import widgets  # noqa: E402
from nlflow.desk.explorer.denoise_tab import DenoiseTab  # noqa: E402
from nlflow.desk.explorer.desk import Desk  # noqa: E402
from nlflow.desk.explorer.flow_tab import FlowTab  # noqa: E402
from nlflow.desk.explorer.layers_tab import LayersTab  # noqa: E402
from nlflow.desk.explorer.server import Contents  # noqa: E402
from nlflow.desk.explorer.worker import Job  # noqa: E402


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("--max-upload", "1") as (url, process):
        yield url
        process.terminate()
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said
        assert "ERROR" not in said


def own(address: str) -> str:
    """Return the origin of the server's pages."""
    return f"http://{urlsplit(address).netloc}"


@functools.cache
def cookie(address: str) -> str:
    """Return the cookie that a browser gets for the token of an address."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    connection.request("GET", f"/?{parts.query}")
    answer = connection.getresponse()
    connection.close()
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    assert answer.headers["Set-Cookie"].endswith("; Path=/; HttpOnly; SameSite=Lax")
    return str(answer.headers["Set-Cookie"]).split(";")[0]


def connect(url: str, origin: str | None) -> Any:
    """Open the websocket as a page from `origin` would, and return what the server answers first."""
    from tornado.httpclient import HTTPClientError, HTTPRequest

    parts, token = urlsplit(url), page_token(url)

    async def attempt() -> Any:
        headers = {"Cookie": cookie(url)} | ({} if origin is None else {"Origin": origin})
        request = HTTPRequest(f"ws://{parts.netloc}/ws", headers=headers)
        try:
            connection = await tornado.websocket_connect(request, subprotocols=["bokeh", token])
        except HTTPClientError as error:
            return error.code
        try:
            return await asyncio.wait_for(connection.read_message(), 10)
        finally:
            await leave(connection)

    return asyncio.run(attempt())


def page_token(address: str) -> str:
    """Return the token that a page of the server holds."""
    found = re.search(rb'"token":\s*"([^"]+)"', get(address, "/")[1])
    assert found
    return found[1].decode()


async def leave(connection: Any) -> None:
    """Close a websocket, and wait until the server has closed it too."""
    connection.close()
    while await asyncio.wait_for(connection.read_message(), 10) is not None:
        pass


@pytest.mark.slow
def test_own_pages_connect_and_others_do_not(address: str) -> None:
    port = urlsplit(address).port
    assert "msgid" in connect(address, own(address))
    assert "msgid" in connect(address, f"http://localhost:{port}")
    for origin in ("http://example.org", f"http://example.org:{port}", f"http://127.0.0.1:{(port or 0) + 1}", "null"):
        assert connect(address, origin) == 403, origin


def exchange(address: str, *lines: str) -> tuple[int, str]:
    """Send a request as it is written here, and the cookie, and return the status and the rest of the answer."""
    parts = urlsplit(address)
    if not any(line.startswith("Cookie:") for line in lines):
        lines = (*lines, f"Cookie: {cookie(address)}")
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = connection.recv(4096)
        while b"\r\n\r\n" not in answer:
            answer += connection.recv(4096)
        return int(answer.split()[1]), answer.decode(errors="replace")


_SHAKE = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
          "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")  # fmt: skip


@functools.cache
def kept_token(address: str) -> str:
    """Return the token of one page, since a page takes long to make."""
    return page_token(address)


def shake(address: str, *headers: str) -> int:
    """Return the status that the handshake of a websocket gets."""
    words = f"Sec-WebSocket-Protocol: bokeh, {kept_token(address)}"
    return exchange(address, "GET /ws HTTP/1.1", *headers, *_SHAKE, words)[0]


_OWN = ["127.0.0.1:{}", "localhost:{}", "LocalHost:{}", "[::1]:{}"]
_FOREIGN = ["evil.example:{}", "127.0.0.1", "localhost:1", "localhost.:{}", "127.0.0.1.evil.example:{}",
            "127.0.0.1:{}.evil.example", "evil.example@127.0.0.1:{}", "0.0.0.0:{}", "127.1:{}", "[::1]", "evil.example",
            ""]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("host", _OWN)
def test_own_names_are_answered(address: str, host: str) -> None:
    host = host.format(urlsplit(address).port)
    assert exchange(address, "GET /favicon.ico HTTP/1.1", f"Host: {host}")[0] == 200
    assert shake(address, f"Host: {host}", f"Origin: http://{host}") == 101


@pytest.mark.parametrize("host", _FOREIGN)
def test_foreign_names_are_refused(address: str, host: str) -> None:
    """A name that another site has pointed to this machine."""
    host = host.format(urlsplit(address).port)
    status = 400 if "@" in host else 403  # no name at all
    for path in ("/", "/static/js/bokeh.min.js", "/static/extensions/panel/panel.min.js", "/favicon.ico", "/metadata",
                 "/autoload.js", "/components/panel/x/y/z", "/none"):  # fmt: skip
        assert exchange(address, f"GET {path} HTTP/1.1", f"Host: {host}")[0] == status, path
    assert exchange(address, "POST / HTTP/1.1", f"Host: {host}", "Content-Length: 0")[0] == status
    assert shake(address, f"Host: {host}", f"Origin: http://{host}") == status
    assert shake(address, f"Host: {host}", f"Origin: {own(address)}") == status


def test_another_user_gets_nothing(address: str) -> None:
    """Who reaches the port, but has not read the address that the command printed."""
    host = f"Host: {urlsplit(address).netloc}"
    name, value = cookie(address).split("=", 1)
    for given in (
        "",
        f"{name}=",
        f"{name}={value[:-1]}",
        f"{name}=x{value}",
        f"other={value}",
        "\xff",
        f"{name}={name}",
    ):
        for path in ("/", "/favicon.ico", "/static/js/bokeh.min.js", "/?token=", "/?token=x", f"/?token={value}"):
            status, answer = exchange(address, f"GET {path} HTTP/1.1", host, f"Cookie: {given}")
            assert status == 403, (given, path)
            assert "Set-Cookie" not in answer
        assert shake(address, host, f"Origin: {own(address)}", f"Cookie: {given}") == 403
    token = urlsplit(address).query
    assert exchange(address, f"GET /?{token}&{token} HTTP/1.1", host, "Cookie: ")[0] == 403
    assert exchange(address, f"POST /?{token} HTTP/1.1", host, "Content-Length: 0", "Cookie: ")[0] == 403
    assert "open the whole address" in exchange(address, "GET / HTTP/1.1", host, "Cookie: ")[1]


def test_a_ticket_opens_the_page_once() -> None:
    keys = server.Keys(5006)
    ticket = keys.ticket()
    assert [bool(keys.open(token)) for token in (ticket, ticket, keys.token, keys.token, "x")] == [1, 0, 1, 1, 0]


def test_a_refusal_says_why(address: str) -> None:
    _, answer = exchange(address, "GET / HTTP/1.1", "Host: evil.example")
    head, text = answer.split("\r\n\r\n")
    assert "Content-Type: text/plain" in head
    assert text.startswith("nonlocal explore: Host: got 'evil.example', expected a name and the port")
    assert "open the address that the command printed" in text
    assert text.count("\n") == 1


def test_a_request_has_one_host(address: str) -> None:
    own = f"Host: {urlsplit(address).netloc}"
    assert exchange(address, "GET / HTTP/1.1")[0] == 400
    assert exchange(address, "GET / HTTP/1.0")[0] == 403
    assert exchange(address, "GET /favicon.ico HTTP/1.0", own)[0] == 200
    for hosts in ([own, own], [own, "Host: evil.example"], ["Host: evil.example", own]):
        assert exchange(address, "GET / HTTP/1.1", *hosts)[0] in (400, 403), hosts
    assert exchange(address, "GET / HTTP/1.1", "Host: evil.example", own.replace("Host", "X-Forwarded-Host"))[0] == 403


def test_a_websocket_is_for_own_pages(address: str) -> None:
    parts = urlsplit(address)
    own = f"Host: {parts.netloc}"
    origin = f"http://{parts.netloc}"
    assert shake(address, own, f"Origin: {origin}") == 101
    for origins in ([], ["http://evil.example"], [f"http://evil.example:{parts.port}"], ["null"], [""],
                    [origin, "http://evil.example"], [f"https://{parts.netloc}"], [f"{origin}/"],
                    ["http://localhost:1"], [parts.netloc]):  # fmt: skip
        assert shake(address, own, *(f"Origin: {one}" for one in origins)) == 403, origins
    assert shake(address, own, "Origin: http://evil.example", "Sec-Fetch-Site: same-origin") == 403
    assert shake(address, own, "Sec-WebSocket-Origin: http://evil.example") == 403
    assert exchange(address, "GET / HTTP/1.1", own, "Origin: http://evil.example")[0] == 403


def test_messages_have_a_limit(address: str) -> None:
    """A message beyond the upload limit ends its connection, and the server goes on."""
    parts, token = urlsplit(address), page_token(address)

    async def attempt() -> Any:
        from tornado.httpclient import HTTPRequest

        request = HTTPRequest(f"ws://{parts.netloc}/ws", headers={"Origin": own(address), "Cookie": cookie(address)})
        connection = await tornado.websocket_connect(request, subprotocols=["bokeh", token])
        for _ in range(3):  # the greeting: header, metadata, content
            await asyncio.wait_for(connection.read_message(), 10)
        try:
            await connection.write_message("x" * 4_000_000)
            return await asyncio.wait_for(connection.read_message(), 20)
        except tornado.WebSocketClosedError:  # before all was sent
            return None
        finally:
            connection.close()

    assert asyncio.run(attempt()) is None
    assert get(address, "/")[0] == 200


_HEAD = '{"msgid": "1", "msgtype": "%s"}'
_MALFORMED: list[tuple[str | bytes, ...]] = [
    ("",), ("{}",), ("null",), ("[1]",), (b"\xff\xfe",), ("{",), (_HEAD % "PATCH-DOC", "{}", "{}"),
    (_HEAD % "PATCH-DOC", "{}", '{"events": 3}'), (_HEAD % "PULL-DOC-REQ", "{}", "[]"), (_HEAD % "EVENT", "{}", "{}"),
    (_HEAD % "PATCH-DOC", "{}", '{"events": [{"kind": "ModelChanged", "model": {"id": "p0"}, "attr": "x", "new": 1}]}'),
    ('{"msgid": "1", "msgtype": "PATCH-DOC", "num_buffers": 1e9}', "{}", "{}", "{}", b"x"),
    (_HEAD % "PATCH-DOC", "{}", '{"events": [{"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": 1}]}'),
]  # fmt: skip


@pytest.mark.slow
def test_malformed_messages_end_a_session_quietly(address: str) -> None:
    """The fixture looks at what the server has said."""

    async def attempt(token: str, fragments: tuple[str | bytes, ...]) -> None:
        from tornado.httpclient import HTTPRequest

        headers = {"Origin": own(address), "Cookie": cookie(address)}
        request = HTTPRequest(f"ws://{urlsplit(address).netloc}/ws", headers=headers)
        connection = await tornado.websocket_connect(request, subprotocols=["bokeh", token])
        with suppress(tornado.WebSocketClosedError):
            for fragment in fragments:
                await connection.write_message(fragment, binary=isinstance(fragment, bytes))
        await leave(connection)

    token = page_token(address)
    for fragments in _MALFORMED:
        asyncio.run(attempt(token, fragments))
    assert get(address, "/")[0] == 200


def get(address: str, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, body, {"Cookie": cookie(address)})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (BrokenPipeError, ConnectionResetError):  # the server has read enough
        return 400, b""
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path",
    ["/../../../../etc/passwd", "/static/../../../../etc/passwd", "/static/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
     "/static/extensions/panel/../../../../../../etc/passwd", "/admin", "/rest/session_info", "/pyproject.toml",
     "/assets/x", "/components/../../etc/passwd", "/components/..%2f..%2fetc/passwd", "/components/.x/a/_css/b",
     "/components//////", "/components/antigravity/x/y/z", "/static/%00", "/static/extensions/panel/%00", "/static/%ff",
     "/static/..%5c..%5cx", "/static/%0d%0aX: y", "/static/", "/static/js", "//evil.example", "/ws/", "/%00", "*",
     "/metadata", "/autoload.js", "/?bokeh-token=x", "/?bokeh-session-id=x", "/ws?bokeh-session-id=x"],
)  # fmt: skip
def test_no_file_of_the_machine_is_served(address: str, path: str) -> None:
    status, content = exchange(address, f"GET {path} HTTP/1.1", f"Host: {urlsplit(address).netloc}")
    assert status in ((400,) if " " in path else (403, 404)), content[:200]
    assert "root:" not in content


def test_bodies_have_a_limit(address: str) -> None:
    assert get(address, "/", "POST", bytes(3_000_000))[0] in (400, 405, 413)
    assert get(address, "/")[0] == 200


@pytest.mark.slow
def test_the_page_names_no_other_server(address: str) -> None:
    status, content = get(address, "/")
    assert status == 200
    page = content.decode()
    assert "width=device-width" in page
    for start in ('src="http', 'href="http', "cdn.", "unpkg", "jsdelivr"):
        assert start not in page, start


# ---- parts of the page, without a browser


@pytest.fixture
def desk() -> Iterator[Desk]:
    import skimage.metrics  # noqa: F401  # as the server does: not in two threads at a time

    from nlflow.desk.explorer.worker import Worker

    worker = Worker()
    yield Desk(worker, uploads.Limits(content=10_000), None)
    worker.close()


def until(there: Callable[[], Any]) -> None:
    """Wait until something is so."""
    import time

    end = time.monotonic() + 15
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def settle(tab: Any, kind: str = "done") -> str:
    """Wait until a tab says that it is done, and return what it says."""
    until(lambda: tab.status.shown["kind"] == kind)
    return str(tab.status.shown["words"])


def small(size: int = 40) -> bytes:
    """Return a noisy PNG."""
    from PIL import Image

    stream = io.BytesIO()
    values = np.random.default_rng(0).normal(128, 20, (size, size))
    Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def little() -> Source:
    """Return a picture of 40 x 40 pixels with its reference, which takes less time than the example."""
    one = example()
    assert one.clean is not None
    cut = slice(100, 140), slice(100, 140)
    return replace(one, media=replace(one.media, data=one.media.data[cut]), clean=one.clean[cut])


def sent(name: str, content: bytes) -> dict[str, str]:
    return {"name": name, "content": base64.b64encode(content).decode()}


BROKEN = {
    "content": ({"name": "../x.png", "content": "bm8gcGljdHVyZQ=="}, "x.png: got a text file"),
    "encoding": ({"name": "x.png", "content": "***"}, "base64"),
    "size": ({"name": "x.png", "size": 5e9}, "expected at most 9.766 KiB"),
    "bytes": (sent("x.png", bytes(10_001)), "--max-upload"),
    "gone": ({"name": "x.png"}, "cannot read"),
    "kind": (sent("x.exe", b""), "expected one of"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.sampled(2)
def test_a_broken_file_leaves_nothing_of_the_former_one(desk: Desk, case: str) -> None:
    tab = DenoiseTab(desk, little())
    tab.start()
    settle(tab)
    message, words = BROKEN[case]
    tab.upload._handle_msg(message)
    told = settle(tab, "error")
    assert words in told
    assert told.endswith("open another file.")
    assert not any(part.visible for part in (*tab.shown, tab.kept, tab.reference))
    tab.start()  # a setting is moved all the same
    tab._look_again()
    tab._download()
    assert (tab.status.shown["words"], tab.status.shown["kind"]) == (told, "error")
    tab.upload._handle_msg(sent("a.png", small()))
    assert settle(tab).startswith("a.png: ")
    assert all(part.visible for part in (*tab.shown, tab.kept, tab.reference))
    assert "'a.png'" in tab.code.shown["python"]


def test_a_refused_reference_takes_the_former_one_along(desk: Desk) -> None:
    tab = DenoiseTab(desk, little())
    tab.start()
    settle(tab)
    assert "PSNR" in tab.figures.object
    tab.reference._handle_msg(sent("<b>.png", small(30)))
    until(lambda: tab.refusal.object)
    settle(tab)
    assert "PSNR" not in tab.figures.object
    assert "clean" not in {item["name"] for item in tab.pictures.shown["items"]}
    assert tab.refusal.object.startswith('<p class="refused" role="alert">clean: got &lt;b&gt;.png of')
    assert tab.refusal.object.endswith("The result has no reference.</p>")
    tab.upload._handle_msg(sent("a.png", small()))
    settle(tab)
    assert tab.refusal.object == ""


def test_the_last_result_is_grey_while_another_is_computed(desk: Desk) -> None:
    tab = DenoiseTab(desk, little())
    grey: list[set[bool]] = []

    def look() -> None:
        grey.append({any(name.startswith("stale-") for name in part.css_classes) for part in tab.shown})

    tab.start()
    look()
    settle(tab)
    look()
    tab.knobs["sigma"]._take({"value": 20.0, "automatic": False, "move": 1})
    look()
    tab._cancel()
    look()
    assert tab.status.shown["words"] == "cancelled: what is grey is the last result"
    tab.start()
    settle(tab)
    tab._download()  # which shows nothing else
    look()
    settle(tab)
    assert grey == [{True}, {False}, {True}, {True}, {False}]


@pytest.mark.slow
def test_best_shows_a_coarse_picture_first(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    tab = DenoiseTab(desk, little())
    tab.quality.value = "best"  # which starts
    settle(tab)
    shown: list[tuple[bool, list[bool], Any]] = []
    draw = tab.pictures.draw

    def look(*given: Any, coarse: bool, **words: Any) -> None:
        draw(*given, coarse=coarse, **words)
        grey = [any(name.startswith("stale-") for name in part.css_classes) for part in tab.shown]
        shown.append((coarse, grey, tab.pictures.shown["items"][1]["src"]))

    monkeypatch.setattr(tab.pictures, "draw", look)
    tab.knobs["strength"]._take({"value": 1.5, "automatic": False, "move": 1})
    settle(tab)
    # The numbers stay grey beside the coarse picture; the final one is drawn before its numbers are there.
    assert [one[:2] for one in shown] == [(True, [False, True]), (False, [False, True])]
    assert shown[0][2] != shown[1][2]
    assert tab.pictures.shown["coarse"] is False


def test_what_a_superseded_job_has_found_is_shown_and_the_status_stays_busy(desk: Desk) -> None:
    tab, said = DenoiseTab(desk, little()), []
    job = Job(lambda progress: None, lambda job: None)
    job.superseded, job.result = True, "older"
    tab.status.say("computing …", "busy")
    tab._finish(job, lambda result: said.append(result) or "words", lambda message: message)
    assert said == ["older"]
    assert tab.status.shown["kind"] == "busy"
    before = tab.shown[0].css_classes
    tab._finish(job, lambda result: "words", lambda message: message)
    # Another class begins the wait anew; were it the same, the page would turn grey although answers come.
    assert {*before, *tab.shown[0].css_classes} >= {"stale-0", "stale-1"}


def test_a_new_file_ends_what_is_computed_of_the_former(desk: Desk) -> None:
    tab = DenoiseTab(desk, little())
    tab.start()
    settle(tab)
    began, gate = threading.Event(), threading.Event()
    shown: list[str] = []

    def work(report: Any) -> str:
        began.set()
        gate.wait(30)
        return "of the former"

    tab.ask(work, lambda result: shown.append(result))
    assert began.wait(30)
    tab._take(little())
    gate.set()
    tab.start()
    settle(tab)
    assert shown == []


def test_contrast_is_drawn_anew_and_nothing_is_computed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    tab = DenoiseTab(desk, little())
    tab.start()
    settle(tab)
    assert (tab.black.shown["value"], tab.white.shown["value"]) == (0.0, 255.0)
    monkeypatch.setattr(denoising_view, "compute", lambda *given, **words: pytest.fail("it was computed"))
    tab.white._take({"value": 100.0, "automatic": False, "move": 1})
    settle(tab)
    assert "white is 100" in tab.pictures.shown["items"][0]["caption"]
    shown = base64.b64decode(tab.pictures.still["noisy"].partition(",")[2])
    from PIL import Image

    levels = np.asarray(Image.open(io.BytesIO(shown)))
    expected = np.rint(np.minimum(little().media.data / 100.0, 1) * 255)
    np.testing.assert_array_equal(levels, expected)
    white = next(line for line in tab.histogram.shown["lines"] if line["name"] == "white")
    assert white["x"] == [100.0, 100.0]


def test_the_part_is_where_the_whole_picture_was_clicked(desk: Desk) -> None:
    large = Source(Media(Path("a.png"), "png", "image", np.zeros((400, 600), np.uint8)), "a.png")
    tab = DenoiseTab(desk, large)
    tab._move_part({"y": 0.5, "x": 0.0})
    assert tab.settings(full=False).crop == ((72, 328), (0, 256))
    tab._move_part({"y": 1.0, "x": 0.6})
    assert tab.settings(full=False).crop == ((144, 400), (232, 488))


def test_a_model_of_noise_is_used_once_it_is_sent(desk: Desk) -> None:
    tab = DenoiseTab(desk, little())
    tab.start()
    settle(tab)
    tab.model._handle_msg(sent("m.json", b'{"kind": "gaussian", "sigma": 9}'))
    until(lambda: tab.noise_kind.value == "file")
    settle(tab)
    assert "load_noise('m.json')" in tab.code.shown["python"]
    assert not tab.knobs["sigma"].visible
    tab.model._handle_msg(sent("m.json", b'{"kind": "worst"}'))
    assert "m.json: noise: got the kind 'worst'" in settle(tab, "error")
    tab.noise_kind.value = "poisson"
    settle(tab)
    assert not tab.knobs["strength"].visible
    assert "that of counts" in tab.figures.object
    tab.undo()
    assert tab.noise_kind.value == "auto"
    assert tab.knobs["sigma"].visible


def test_sliders_and_numbers_agree(desk: Desk) -> None:
    tab = DenoiseTab(desk, little())
    tab.start()
    settle(tab)
    assert tab._result is not None
    info = tab._result.info
    assert tab.knobs["sigma"].shown["value"] == info.sigma
    assert tab.knobs["fidelity"].shown["value"] == info.parameters["fidelity_mean"]
    assert f"<td>{info.sigma:.4g} grey levels" in tab.figures.object
    tab.knobs["sigma"]._take({"value": 21.37, "automatic": False, "move": 1})  # no step of the slider
    assert tab.settings(full=False).sigma == 21.37
    tab.knobs["patch_size"]._take({"value": 6.2, "automatic": False, "move": 1})
    assert tab.settings(full=False).patch_size == 7  # odd


def test_the_window_of_a_signal_is_moved(desk: Desk) -> None:
    values = np.random.default_rng(0).normal(size=4050)
    tab = DenoiseTab(desk, Source(Media(Path("a.npy"), "npy", "signal", values), "a.npy"))
    tab.start()
    settle(tab)

    def window() -> tuple[float, ...]:
        x = tab.signal.lines.shown["lines"][0]["x"]
        return x[0], len(x)

    assert window() == (1025, 2000)
    for data, expected in (
        ({"factor": 0.5}, (1525, 1000)), ({"shift": 0.1}, (1425, 1000)), ({"factor": 1e-9}, (1925, 20)),
        ({"factor": float("inf")}, (0, 4050)), ({"factor": 0.2}, (1620, 810)), ({"shift": -99.0}, (3240, 810)),
    ):  # fmt: skip
        tab.signal.move(data)
        settle(tab)
        assert window() == expected
    tab.signal.first._take({"value": 17, "automatic": False, "move": 1})
    settle(tab)
    assert window() == (17, 810)


def test_knobs_are_kept_in_their_ranges(desk: Desk) -> None:
    tab = DenoiseTab(desk, example())
    tab.knobs["sigma"]._handle_msg({"value": 1e9, "automatic": False, "move": 1})
    assert tab.settings(full=False).sigma == 80
    tab.knobs["sigma"]._handle_msg({"value": -1e9, "automatic": False, "move": 2})
    assert tab.settings(full=False).sigma == 0.5
    with pytest.raises(ValueError, match="worst not in list"):
        tab.quality._process_events({"value": "worst"})
    assert tab.settings(full=False).quality == "pixels"
    tab.quality._process_events({"value": "best"})
    tab.knobs["steps"]._handle_msg({"value": 7, "automatic": False, "move": 3})
    assert tab.settings(full=False).steps is None  # best has none
    tab.undo()
    assert tab.settings(full=False) == DenoiseTab(desk, example()).settings(full=False)


@pytest.mark.slow
def test_strength_is_for_noise_that_is_found(desk: Desk) -> None:
    tab = DenoiseTab(desk, example())
    assert tab.settings(full=False).strength is None
    tab.knobs["strength"]._handle_msg({"value": 1.5, "automatic": False, "move": 1})
    assert tab.settings(full=False).strength == 1.5
    settle(tab)
    assert "confidence" in tab.noise_text.object
    assert tab.noise.visible
    assert [line["name"] for line in tab.levels.shown["lines"] + tab.powers.shown["lines"]] == ["σ", "power"]
    tab.knobs["sigma"]._handle_msg({"value": 20.0, "automatic": False, "move": 1})
    assert tab.settings(full=False).strength is None
    settle(tab)
    assert tab.knobs["strength"].shown["disabled"]
    assert not tab.noise.visible
    assert "given" in tab.noise_text.object


def test_parts_beside_each_other_keep_their_least_width() -> None:
    narrow = widgets.columns(widgets.heading("a"), widgets.heading("b"), least=120)
    assert [part.styles["flex"] for part in narrow] == ["1 1 120px", "1 1 120px"]
    assert {part.styles["min-width"] for part in narrow} == {"min(120px, 100%)"}


def test_a_choice_keeps_what_is_chosen_where_it_can() -> None:
    moves: list[Any] = []
    one = widgets.choice("run", "run", {}, lambda: moves.append(one.value))
    widgets.offer(one, {"0": "as it is", "1": "with it"})
    one.value = "1"
    widgets.offer(one, {"1": "with it", "2": "more"})
    assert one.value == "1"
    widgets.offer(one, {"0": "as it is"})
    assert (one.value, one.options) == ("0", {"as it is": "0"})
    assert moves == ["0", "1", "0"]


@pytest.mark.slow
def test_what_has_not_changed_is_not_sent(desk: Desk) -> None:
    tab, changes = DenoiseTab(desk, example()), []
    for knob in tab.knobs.values():
        knob.param.watch(changes.append, "shown")
    tab.start()
    settle(tab)
    assert len(changes) <= len(tab.knobs)  # what was chosen
    changes.clear()
    tab.start()
    settle(tab)
    assert changes == []


@pytest.mark.slow
def test_other_tabs_without_a_browser(desk: Desk, tmp_path: Path) -> None:
    flow = FlowTab(desk)
    flow.start()
    settle(flow)
    assert "equilibrium" in flow.code.shown["python"]
    layers = LayersTab(desk)
    layers.start()
    assert layers.status.shown["words"].startswith("example.json: ViTModel")
    assert len(layers.charts["cosine"].shown["lines"]) == 2
    assert "nonlocal attention" in layers.about.object
    layers.upload._handle_msg({"name": "r.json", "content": base64.b64encode(b"[]").decode()})
    assert "r.json: got" in settle(layers, "error")
    assert not layers.shown[0].visible


# ---- the command


def run(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["explore", "--no-browser", *words], prog_name="nonlocal")


@pytest.mark.slow
def test_errors_of_the_command_are_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((9, 9)))
    np.save(tmp_path / "b.npy", np.zeros((8, 8)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            (str(tmp_path / "missing.png"),): "no such file",
            (str(tmp_path / "a.npy"), "--clean", str(tmp_path / "b.npy")): "shape",
            ("--trace", str(tmp_path / "missing.json")): "can be read",
            ("--port", port): f"--port: got {port}, which another program uses",
            ("--host", "203.0.113.9", "--port", "0"): "--host: got '203.0.113.9'",
            ("--host", "no.such.host.invalid", "--port", "0"): "--host: got 'no.such.host.invalid'",
        }
        for words, expected in cases.items():
            result = run(*words)
            assert result.exit_code == 1, result.output
            assert expected in result.stderr
            assert result.stderr.splitlines()[-1].startswith("nonlocal: error: ")
    assert run("--clean", str(tmp_path / "b.npy")).exit_code == 2
    assert run("--port", "70000").exit_code == 2


@pytest.mark.slow
def test_without_panel_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nlflow.desk.terminal.find_spec", lambda name: None)
    result = run("--port", "0")
    assert result.exit_code == 1
    assert "pip install 'nlflow[explore]'" in result.stderr


def ipv6() -> bool:
    """Tell whether this machine has the address ::1."""
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "host"), [(signal.SIGINT, "127.0.0.1"), (signal.SIGTERM, "::1" if ipv6() else "localhost")]
)
def test_ctrl_c_ends_it(number: signal.Signals, host: str) -> None:
    with serving("--host", host) as (url, process):
        assert get(url, "/")[0] == 200
        assert "msgid" in connect(url, own(url))
        assert exchange(url, "GET / HTTP/1.1", "Host: evil.example")[0] == 403
        process.send_signal(number)
        assert process.wait(60) in (0, 143)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_other_addresses_are_warned_of() -> None:
    command = [
        sys.executable,
        "-m",
        "nlflow.desk.commands.main",
        "explore",
        "--no-browser",
        "--port",
        "0",
        "--host",
        "0.0.0.0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        port = urlsplit(url).port
        here = f"http://127.0.0.1:{port}/?{urlsplit(url).query}"
        assert "msgid" in connect(here, f"http://{socket.gethostname()}:{port}")
        assert connect(here, f"http://example.org:{port}") == 403
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert process.stderr is not None
        assert "whoever reads this address" in process.stderr.read()


@pytest.mark.slow
def test_names_as_browsers_write_them() -> None:
    from nlflow.desk.explorer.server import hosts_of

    assert hosts_of(["0:0:0:0:0:0:0:1", "MyHost", "127.0.0.1"], 80) == {
        "[::1]", "[::1]:80", "myhost", "myhost:80", "127.0.0.1", "127.0.0.1:80",
    }  # fmt: skip
    assert hosts_of(["::1", "FE80::A"], 81) == {"[::1]:81", "[fe80::a]:81"}


@pytest.mark.slow
def test_loopback_addresses() -> None:
    assert [server.is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.5.5.5")] == [True] * 4
    assert [server.is_loopback(host) for host in ("0.0.0.0", "192.168.0.2", "example.org", "::")] == [False] * 4
    with pytest.raises(InputError, match="--host"):
        server.start(Contents(example()), host="203.0.113.9")


def test_another_thread_leaves_the_document_alone(desk: Desk) -> None:
    """While a document holds events it loses what other threads add to them: pages stayed at "drawing ..."."""
    threads: list[int] = []

    class Document:
        session_context = "of a page that is there"

        def add_next_tick_callback(self, function: Callable[[], Any]) -> None:
            threads.append(threading.get_ident())

    loop = asyncio.new_event_loop()
    desk = replace(desk, document=Document(), loop=loop)
    other = threading.Thread(target=desk.later, args=(print,))
    other.start()
    other.join()
    assert not threads
    loop.run_until_complete(asyncio.sleep(0))
    assert threads == [threading.get_ident()]
    loop.close()
    desk.later(print)  # of a server that has ended
