"""Starting threads of compiled loops."""

# A layer of Numba ends the process in two cases: GNU OpenMP in a child of `os.fork` (`multiprocessing` and the workers
# of a DataLoader on Linux), and ``workqueue`` where two threads of the caller start a loop at a time. In both a loop
# runs in the thread that calls it, cut into the same pieces, each summed in the same order: the bits are the same.
#
# Numba's loops call the layer by the name ``numba_parallel_for``. Loops of this package are linked to the function
# `_launching` by that name, which decides and calls on.

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config
from numba.core.cgutils import intp_t
from numba.np.ufunc import parallel

from nlflow.backends import forks
from nlflow.errors import InputError

_LAYER, _OWN = "numba_parallel_for", "nlflow_parallel_for"
_INT, _ADDRESS, _NOTHING = ir.IntType(32), intp_t, ir.VoidType()
_LOOP = ir.FunctionType(_NOTHING, [_ADDRESS] * 4)
_LAUNCH = ir.FunctionType(_NOTHING, [_ADDRESS] * 8)


@contextmanager
def linked() -> Iterator[None]:
    """Link the loops that are compiled or loaded within the context to the launcher of this module."""
    layer, engine = _launcher()
    llvm.add_symbol(_LAYER, engine.get_function_address(_OWN))
    try:
        yield
    finally:
        llvm.add_symbol(_LAYER, layer)


@cache
def start_threads() -> None:
    # GNU OpenMP gives the thread that starts them their number for all its later work: torch, on the same library,
    # would compute on so many threads from then on, whatever its user had set.
    with ThreadPoolExecutor(1) as starter:
        try:
            starter.submit(parallel._launch_threads).result()
        except ValueError as error:
            raise InputError(
                f"NUMBA_THREADING_LAYER: got {config.THREADING_LAYER!r}, which cannot be loaded here, expected one "
                "that can be; unset it, set it to workqueue, or install the layer, as with pip install tbb"
            ) from error


@cache
def _launcher() -> tuple[int, Any]:
    """Return the address of the layer's function, and what holds the compiled one of ours."""
    start_threads()
    layer = llvm.address_of_symbol(_LAYER)
    module = llvm.parse_assembly(str(_launching(layer, one_at_a_time=parallel.threading_layer() == "workqueue")))
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine(opt=2))
    engine.finalize_object()
    return layer, engine


def _launching(layer: int, one_at_a_time: bool) -> ir.Module:
    """Return the function that has the arguments of the layer's: the loop, its own four, and what threads need."""
    module = ir.Module()
    function = ir.Function(module, _LAUNCH, _OWN)
    busy = ir.GlobalVariable(module, _INT, "busy")
    busy.initializer, busy.linkage = _INT(0), "internal"
    start, ask, alone, shared = (function.append_basic_block(name) for name in ("start", "ask", "alone", "shared"))
    loop, *given = function.args
    builder = ir.IRBuilder(start)
    forked = builder.load_atomic(builder.inttoptr(_ADDRESS(forks.address()), _INT.as_pointer()), "seq_cst", 4)
    one = builder.icmp_signed("<=", given[-1], _ADDRESS(1))
    builder.cbranch(builder.or_(builder.icmp_signed("!=", forked, _INT(0)), one), alone, ask)
    builder.position_at_end(ask)
    taken = builder.atomic_rmw("xchg", busy, _INT(int(one_at_a_time)), "seq_cst")
    builder.cbranch(builder.icmp_signed("!=", taken, _INT(0)), alone, shared)
    builder.position_at_end(alone)
    builder.call(builder.inttoptr(loop, _LOOP.as_pointer()), given[:4])
    builder.ret_void()
    builder.position_at_end(shared)
    builder.call(builder.inttoptr(_ADDRESS(layer), _LAUNCH.as_pointer()), function.args)
    builder.store_atomic(_INT(0), busy, "seq_cst", 4)
    builder.ret_void()
    return module
