"""A plugin of pytest for environments without extras: a test that needs one is skipped, and says which."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

# Import names of what the extras bring, and of tools of tests.
OPTIONAL = frozenset({
    *("av", "bokeh", "dask", "distributed", "finufft", "h5netcdf", "h5py", "jax", "mpmath", "networkx", "nibabel"),
    *("panel", "param", "pylops", "pynndescent", "pyproximal", "rawpy", "safetensors", "selenium", "sklearn"),
    *("torch", "tornado", "transformers", "xarray", "zarr"),
})  # fmt: skip


def lacked(error: BaseException | None) -> str | None:
    """Return the name of the optional package whose absence is behind an error; None for other errors."""
    while error is not None:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in OPTIONAL:
            return name
        error = error.__cause__ or error.__context__
    return None


def _skipped(report: Any, where: str, name: str) -> None:
    report.outcome = "skipped"
    report.longrepr = (where, 0, f"Skipped: {name} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip a test that has failed for want of an optional package."""
    report = yield
    if report.failed and call.excinfo is not None and (name := lacked(call.excinfo.value)):
        _skipped(report, str(item.path), name)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Skip a file that cannot be read for want of an optional package."""
    report = yield
    error = getattr(report, "call", None)
    if report.failed and error is not None and error.excinfo and (name := lacked(error.excinfo.value)):
        _skipped(report, str(collector.path), name)
    return report
