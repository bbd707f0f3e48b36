"""A cluster of Dask on this machine whose connections begin with a shared key."""

# Whoever reaches a port of a scheduler or worker may run code as its owner. Both ends of a connection show that they
# know the key (HMAC-SHA256 of fresh numbers of both, RFC 2104) before they read a message, and neither sends it.
# Workers get the key through the pipe that starts them. The folder belongs to this user alone: Dask imports modules
# from it.

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import shutil
import tempfile
import weakref
from typing import Any

import dask
from distributed import LocalCluster, Nanny, Worker
from distributed.comm import registry
from distributed.comm.core import FatalCommClosedError
from distributed.comm.tcp import BaseTCPBackend, TCPConnector, TCPListener

_SCHEME = "keyed"
_LENGTH = 32  # bytes of a fresh number, and of a proof
_NO_LENGTH = b"\xff" * 8  # a usual client of Dask takes the first bytes for the length of a message, and gives up
_PATIENCE = 30.0  # seconds in which the other end has to show that it knows the key

_key = secrets.token_bytes(_LENGTH)


async def _greeted(stream: Any, own: bytes, other: bytes) -> bool:
    """Return whether the other end of a stream knows the key; `own` and `other` tell the ends apart."""
    sent = _NO_LENGTH + secrets.token_bytes(_LENGTH - len(_NO_LENGTH))
    await stream.write(sent)
    received = await stream.read_bytes(_LENGTH)
    await stream.write(hmac.digest(_key, own + sent + received, "sha256"))
    proof = await stream.read_bytes(_LENGTH)
    return hmac.compare_digest(proof, hmac.digest(_key, other + received + sent, "sha256"))


async def _admitted(stream: Any, own: bytes, other: bytes) -> bool:
    """Return whether a stream may be used; one that may not is closed."""
    known = False
    try:
        known = await asyncio.wait_for(_greeted(stream, own, other), _PATIENCE)
    except (OSError, TimeoutError):  # it was closed, or says nothing
        pass
    finally:
        if not known:
            stream.close()
    return known


class _Connector(TCPConnector):  # type: ignore[misc]  # its base has no types, as those below
    prefix = f"{_SCHEME}://"

    async def connect(self, address: str, deserialize: bool = True, **words: Any) -> Any:
        """Return a connection to an end that knows the key."""
        comm = await super().connect(address, deserialize, **words)
        if not await _admitted(comm.stream, b"from", b"to"):
            raise FatalCommClosedError(f"{address} does not belong to this cluster")
        return comm


class _Listener(TCPListener):  # type: ignore[misc]
    prefix = f"{_SCHEME}://"

    async def _prepare_stream(self, stream: Any, address: str) -> Any:
        return stream if await _admitted(stream, b"to", b"from") else None


class _Backend(BaseTCPBackend):  # type: ignore[misc]
    _connector_class = _Connector
    _listener_class = _Listener


registry.backends[_SCHEME] = _Backend()


class _Worker(Worker):  # type: ignore[misc]
    """A worker that gets the key before it connects, and shows no pages."""

    def __init__(self, *args: Any, key: bytes, **words: Any) -> None:
        global _key  # one of a process, as Dask's registry is
        _key = key
        super().__init__(*args, **words)

    def start_http_server(self, *args: Any, **words: Any) -> None:
        super().start_http_server(*args, **words)
        self.http_server.stop()


class _Keeper(Nanny):  # type: ignore[misc]
    """What starts a worker, and starts it again when it dies."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, worker_class=_Worker, key=_key, **words)


def local_cluster(count: int | None) -> Any:
    """Return a cluster of `count` processes on this machine, by default one for each core."""
    # Any free port: with None Dask warns where its usual port is taken. A heartbeat that meets a scheduler which is
    # closing is logged with a stack trace; what fails in a call is raised.
    folder = tempfile.mkdtemp(prefix="nlflow-", dir=dask.config.get("temporary-directory", None))
    try:
        with dask.config.set({"temporary-directory": folder}):
            found = LocalCluster(
                n_workers=count, threads_per_worker=1, dashboard_address="127.0.0.1:0", worker_class=_Keeper,
                protocol=f"{_SCHEME}://", silence_logs=logging.CRITICAL,
            )  # fmt: skip
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(found, shutil.rmtree, folder, ignore_errors=True)
    found.scheduler.http_server.stop()
    return found
