"""Clusters of this machine: nobody without their key gets an answer."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

pytest.importorskip("distributed", reason="the extra distributed is not installed")

import dask
from distributed import Client, LocalCluster
from distributed.comm import connect, listen

from nlflow import InputError
from nlflow.backends import keyed, workers

SOURCES = Path(workers.__file__).parents[1]


async def heard(address: str) -> tuple[list[str], Any]:
    """Return what a listener hears of one who calls it so, and what that one gets."""
    messages: list[str] = []

    async def handle(comm: Any) -> None:
        messages.append(await comm.read())
        await comm.write("answer")

    async with listen("keyed://127.0.0.1:0", handle) as listener:
        port = listener.contact_address.rpartition(":")[2]
        try:
            comm = await connect(f"{address}://127.0.0.1:{port}", timeout=2)
        except (OSError, ValueError) as error:
            return messages, error
        try:
            await comm.write("question")
            return messages, await comm.read()
        except (OSError, ValueError) as error:
            return messages, error
        finally:
            await comm.close()


def test_who_has_the_key_is_answered() -> None:
    assert asyncio.run(heard("keyed")) == (["question"], "answer")


@pytest.mark.parametrize("address", ["tcp", "keyed"])
def test_others_are_not(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    greeted = keyed._greeted

    async def guessed(stream: Any, own: bytes, other: bytes) -> bool:
        if own == b"to":
            return await greeted(stream, own, other)
        for _ in range(2):  # what the right words are as long as, and no look at what comes back
            await stream.write(bytes(32))
            await stream.read_bytes(32)
        return True

    monkeypatch.setattr(keyed, "_greeted", guessed)
    messages, error = asyncio.run(heard(address))
    assert messages == []
    assert isinstance(error, Exception)


class Mirror:
    """The other end of a connection that sends back what it gets."""

    async def write(self, data: bytes) -> None:
        self.data = data

    async def read_bytes(self, count: int) -> bytes:
        return self.data[:count]


def test_a_scheduler_without_the_key_is_not_obeyed() -> None:
    """Whoever takes the port of a scheduler that has ended may repeat what it hears."""
    assert not asyncio.run(keyed._greeted(Mirror(), b"from", b"to"))


def test_one_place_starts_processes_that_listen() -> None:
    """Managers, clusters and listeners of other kinds have no key."""
    listening = re.compile(r"LocalCluster\(|SpecCluster|SyncManager|Manager\(\)|BaseManager|connection import|"
                           r"Client\(processes|socketserver|xmlrpc|http\.server")  # fmt: skip
    found = [path.name for path in SOURCES.rglob("*.py") if listening.search(path.read_text(encoding="utf-8"))]
    assert found == ["keyed.py"]


@pytest.mark.slow
def test_what_a_cluster_keeps_on_disk_is_its_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dask puts its folder first where modules are looked for; the usual one may be made by anybody."""
    folders: list[Path] = []

    class Cluster:
        scheduler = Mock()

        def __init__(self, **words: Any) -> None:
            folders.append(Path(dask.config.get("temporary-directory")))
            if words["n_workers"] == 2:
                raise RuntimeError("a worker died")

    monkeypatch.setattr(keyed, "LocalCluster", Cluster)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = keyed.local_cluster(1)
    assert folders[0].parent == tmp_path
    if os.name == "posix":
        assert folders[0].stat().st_mode & 0o077 == 0
    del found
    gc.collect()
    with pytest.raises(RuntimeError, match="died"):
        keyed.local_cluster(2)
    assert folders[0] != folders[1]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def local() -> Iterator[Any]:
    with workers.cluster(workers.LOCAL, 1):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_no_port_of_a_cluster_runs_code_of_others() -> None:
    for folder in (Path(one) for one in sys.path if "dask" in one):
        assert any(one.stat().st_mode & 0o077 == 0 for one in folder.parents)  # where modules are looked for
    here = psutil.Process()
    ports = [link.laddr for one in (here, *here.children(recursive=True)) for link in one.net_connections("tcp")
             if link.status == psutil.CONN_LISTEN]  # fmt: skip
    assert len(ports) == 3  # of the scheduler, a worker, and what starts it again: no pages
    for ip, port in ports:
        assert ip == "127.0.0.1"
        with pytest.raises((OSError, ValueError)):
            Client(f"tcp://{ip}:{port}", timeout="2s")
        gc.collect()  # a refused client that is collected while the next one starts waits for that one's lock for ever


@pytest.mark.slow
def test_a_client_that_is_connected_is_used() -> None:
    """With its credentials, whatever they are."""
    with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None) as client:
        address = client.scheduler.address
        with workers.cluster(address, None):
            assert Client.current() is client
        assert dict(workers.completed([(pow, (2, 5))], scheduler=address)) == {0: 32}
        with pytest.raises(InputError, match="does not answer"), workers.cluster(f"{address}x", None):
            pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Creating scratch directories")
def test_temporary_credentials_of_a_cluster() -> None:
    """Those of Dask: certificates that are made in memory, and die with the cluster."""
    pytest.importorskip("cryptography", reason="Dask makes temporary credentials with cryptography")
    with LocalCluster(
        n_workers=2, threads_per_worker=1, security=True, protocol="tls://", dashboard_address="127.0.0.1:0"
    ) as cluster:
        address = cluster.scheduler_address
        assert address.startswith("tls://")
        with pytest.raises(InputError, match=r"open a distributed\.Client with its credentials first"):
            dict(workers.completed([(pow, (2, 5))], scheduler=address))
        with Client(cluster):
            assert dict(workers.completed([(pow, (2, n)) for n in range(4)], scheduler=address)) == {
                n: 2**n for n in range(4)
            }
