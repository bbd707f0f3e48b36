"""Calls in worker processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import joblib

from nlflow.errors import InputError, WorkerError, check_integer, not_installed, shortened, warn_caller

LOCAL = "local"
_PATIENCE = 3  # deaths in a row without a call that ended; what kills every worker will not end by itself

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def completed(
    calls: Sequence[Call], *, jobs: int | None = 1, scheduler: str | None = None
) -> Generator[tuple[int, Any]]:
    """Run calls side by side, and yield the number and the result of each as it ends.

    Parameters
    ----------
    calls : sequence of (function, arguments)
        Must be picklable. The call of a worker that died is made again, with a warning.
    jobs : int, optional
        Calls at a time, as for `joblib.Parallel`; not used with the address of a scheduler.
    scheduler : str, optional
        Address of a scheduler of Dask, or ``'local'`` for a cluster of `jobs` processes on this machine.

    Raises
    ------
    WorkerError
        If workers die three times without a call that ended.
    InputError
        For a scheduler that does not answer, or without Dask.
    """
    waiting, deaths = dict(enumerate(calls)), 0
    with ExitStack() as stack:
        died = _lost_errors(scheduler)
        if scheduler is not None and calls:
            stack.enter_context(cluster(scheduler, jobs))
            stack.enter_context(joblib.parallel_config("dask", wait_for_workers_timeout=30))
        while waiting:
            parallel = joblib.Parallel(n_jobs=-1 if scheduler is not None else jobs, return_as="generator_unordered")
            work = [joblib.delayed(_numbered)(number, *call) for number, call in waiting.items()]
            try:
                with closing(parallel(work)) as results:
                    for number, result in results:
                        del waiting[number]
                        deaths = 0
                        yield number, result
            except died as error:
                deaths += 1
                if deaths >= _PATIENCE:
                    raise WorkerError(
                        f"jobs: got {deaths} deaths of worker processes one after the other ({shortened(error)}) with "
                        f"{len(waiting)} call(s) left, expected processes that live; they may lack memory: give fewer "
                        "jobs, or smaller cases. What is done is kept"
                    ) from error
                warn_caller(
                    "a worker process has died, perhaps because it lacked memory; other workers do its work, "
                    f"{len(waiting)} call(s) are left",
                )


def _numbered(number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, Any]:
    return number, function(*arguments)


def _lost_errors(scheduler: str | None) -> tuple[type[BaseException], ...]:
    if scheduler is None:
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        return (TerminatedWorkerError,)
    return (_distributed(scheduler).KilledWorker,)


def _distributed(scheduler: str) -> Any:  # its constructors have no types
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        raise not_installed(f"scheduler: {scheduler!r}", "Dask", "distributed") from error


@contextmanager
def cluster(scheduler: str, jobs: int | None) -> Iterator[None]:
    """Let Dask use a cluster, the one at an address or for ``'local'`` one of `jobs` processes on this machine."""
    # A client that is connected to this scheduler already is used: its credentials may be temporary, and in no file.
    if not isinstance(scheduler, str):
        raise InputError(f"scheduler: got {shortened(repr(scheduler), 60)}, expected 'local' or the address of one")
    if jobs is not None and check_integer("workers", jobs) == 0:
        raise InputError("workers: got 0, expected at least one; leave it out for as many as there are cores")
    distributed = _distributed(scheduler)
    with ExitStack() as stack:
        address: Any = scheduler
        if scheduler == LOCAL:
            address = stack.enter_context(_begun(None if jobs is None or jobs < 0 else jobs))
        elif _is_connected(distributed.Client, scheduler):
            yield
            return
        try:
            stack.enter_context(distributed.Client(address, timeout="10s"))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"scheduler: got {scheduler!r}, which does not answer ({shortened(error)}), expected 'local' or the "
                "address of a running scheduler of Dask, such as tcp://10.0.0.1:8786; for tls:// open a "
                "distributed.Client with its credentials first, or name them in Dask's configuration"
            ) from error
        yield


def _is_connected(client: Any, address: str) -> bool:
    try:
        return bool(client.current().scheduler.address == address)
    except (ValueError, AttributeError):  # there is none, or it was closed
        return False


def _begun(count: int | None) -> Any:
    """Return a local cluster; start it again if a worker dies at its start, which ends the whole cluster."""
    from nlflow.backends.keyed import local_cluster

    for left in reversed(range(_PATIENCE)):
        try:
            return local_cluster(count)
        except RuntimeError as error:
            if not left:
                raise WorkerError(
                    f"scheduler: got {_PATIENCE} deaths of worker processes at their start ({shortened(error)}), "
                    "expected processes that live; they may lack memory: give fewer jobs; or each runs this program "
                    "anew: put what it calls under if __name__ == '__main__'. What was done before is kept"
                ) from error
            warn_caller("a worker process has died at its start; the cluster is started again")
    raise AssertionError("the last attempt returns or raises")
