"""Dask arrays of points: loaded to learn from, and met chunk by chunk where something is asked at them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from nlflow.backends.threads import one_loop_thread
from nlflow.errors import InputError, check_memory


def is_chunked(X: Any) -> bool:
    """Tell whether this is a Dask array."""
    return type(X).__module__.split(".")[0] == "dask"


def loaded(X: Any) -> Any:
    """Return the NumPy array of a Dask array, and anything else as it is.

    Raises
    ------
    MemoryLimitError
        Before it is computed.
    """
    if not is_chunked(X):
        return X
    if X.nbytes == X.nbytes:  # unknown chunks have no number
        check_memory(f"points {X.shape} of a Dask array", int(X.nbytes), "use fewer, or features of fewer dimensions")
    return X.compute()


def by_chunks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of points (M, d) take a Dask array too, of which it returns one, a chunk of rows at a time."""

    @wraps(method)
    def called(self: Any, X: Any) -> Any:
        if not is_chunked(X):
            return method(self, X)
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        if X.ndim != 2 or X.shape[1] != self.n_features_in_:
            raise InputError(f"X: got a Dask array of shape {X.shape}, expected (samples, {self.n_features_in_})")
        like = method(self, self.X_[:1])

        def part(points: Any) -> Any:
            with one_loop_thread():  # Dask has threads of its own
                return method(self, points)

        rows = X.rechunk({1: -1})
        columns = [(size,) for size in like.shape[1:]]
        return rows.map_blocks(
            part, dtype=like.dtype, chunks=(rows.chunks[0], *columns), drop_axis=None if columns else 1, meta=like[:0]
        )

    return called
