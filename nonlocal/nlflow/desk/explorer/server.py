"""The explorer's server: one page on one address of this machine."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from contextlib import suppress
from typing import Any

from nlflow.desk.explorer.gate import bracketed, close_to_others, hosts_of
from nlflow.desk.explorer.page import Contents, build
from nlflow.desk.explorer.worker import Worker
from nlflow.errors import InputError

#: Bytes by which a message may be longer than the upload in it.
_ROOM = 2**20


class Running:
    """A server that runs.

    Attributes
    ----------
    url : str
        Where the page is.
    """

    def __init__(self, server: Any, worker: Worker, url: str) -> None:
        self._server, self._worker = server, worker
        self.url = url

    def wait(self) -> None:
        """Serve until Ctrl-C, or until the loop is stopped."""
        self._server.io_loop.start()

    def stop(self) -> None:
        """End the server and the computing thread."""
        self._server.stop()
        self._worker.close()


def is_loopback(host: str) -> bool:
    """Tell whether an address is one that other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def start(contents: Contents, *, host: str = "127.0.0.1", port: int = 0) -> Running:
    """Start to serve the page.

    Parameters
    ----------
    contents : Contents
        The content of a page when it opens.
    host : str
        The address to listen at.
    port : int
        0 for one that is free.

    Raises
    ------
    InputError
        If the port is in use, or the address does not belong to this machine.
    """
    # Loaded here, not when the computing thread first needs it: CPython 3.11 fails where two threads parse at a time.
    import skimage.metrics  # noqa: F401
    from panel.io.server import get_server

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
    close_to_others(application, hosts)
    application.websocket_origins.update(hosts)
    logging.getLogger("bokeh").setLevel(logging.ERROR)
    server.start()
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return Running(server, worker, f"http://{bracketed(shown)}:{server.port}/")


def _refused(error: OSError, host: str, port: int) -> InputError:
    if error.errno == errno.EADDRINUSE:
        return InputError(f"--port: got {port}, which another program uses; choose another, or 0 for any that is free")
    if error.errno == errno.EACCES:
        return InputError(f"--port: got {port}, which only an administrator may use; choose one from 1024 on")
    return InputError(f"--host: got {host!r} ({error.strerror}), expected an address of this machine, as 127.0.0.1")


def _names() -> set[str]:
    """Return the names by which other machines may call this one."""
    name = socket.gethostname()
    found = {name, socket.getfqdn()}
    with suppress(OSError):  # a machine need not know its own name
        found |= {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    return found
