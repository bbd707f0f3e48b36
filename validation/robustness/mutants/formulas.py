"""Formulas that are broken one by one, for the claims to notice: ``--claims``.

A formula is arithmetic on numbers. What counts samples, cuts arrays, compares or guards (tolerances, rounding, memory),
or tells people how far the work is, is left to the mutants of the tests: no statement of the theory speaks of it. The
map of the claims says which of them run the statement of a formula.

A number that is only compared is part of the comparison, whether it has a name or not. So the value of a local name is
left out where all that reads the name is a comparison, a condition, what is raised, or the value of another such name.
So is a number that asks for memory or is passed as a count by name, and nothing else: the size of a basis. A name that
is also returned, kept, passed on or calculated with is a formula. The table says what the rule leaves out.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from validation.robustness import ROOT
from validation.robustness.mutants.operators import COMPUTED, Finder, Mutant
from validation.robustness.mutants.selection import Batch, Map
from validation.robustness.mutants.workshop import Ran, Workshop, copy

__all__ = ["SCOPE", "Claims", "Formulas", "WithDecisions", "make_claims_map"]

SCOPE = ("functionals", "flows", "equilibria", "kernels", "markov", "learning", "denoising")
"""Rooms whose formulas are broken."""

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
# What these hold, get or return counts something, is an index, a tolerance, or memory.
_COUNTS = {
    *("len", "range", "arange", "shape", "size", "ndim", "itemsize", "nbytes", "bit_length", "max_lag", "axis"),
    *("zeros", "ones", "empty", "full", "eye", "reshape", "ceil", "floor", "perf_counter", "monotonic", "process_time"),
    *(
        "check_memory",
        "check_room",
        "ncv",
        "restart",
        "finfo",
        "iinfo",
        "tiny",
        "eps",
        "join",
        "format",
        "Check",
        "roll",
        "nextafter",
        "spacing",
    ),
    *("pad", "int", "slice", "chunk", "seconds", "warn", "stacklevel", "iterations", "maxiter", "rows", "columns"),
    *("margin", "room", "references", "within", "during", "tell", "telling"),
    *("rtol", "atol", "tol", "rounding", "rounding_of", "enough", "slack", "guess", "ulp", "needed", "bytes", "method"),
}
_COUNTED = ("_bytes", "_rtol", "_tol", "_eps", "_rounding")
_GUARD = 1e-5  # smaller constants keep divisors from zero, or say what rounding may do
_FACTOR = 1.1
_CHANGED = {"+": "-", "-": "+", "*": "/", "/": "*"}


class Formulas(Finder):
    """Look for arithmetic: operations exchanged, signs dropped, constants and exponents times 1.1."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self._deciding
        self._deciding = before | self.deciding(node)
        super().visit_FunctionDef(node)
        self._deciding = before

    _deciding: frozenset[str] = frozenset()

    def deciding(self, function: ast.FunctionDef) -> frozenset[str]:
        """Return the names of a function whose values are left out."""
        return _deciding(function)

    def _assignment(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        if all(isinstance(target, ast.Name) and target.id in self._deciding for target in targets):
            return
        if self.inside and all(_is_number(target) for target in targets):
            self.visit(value)

    def _removed(self, node: ast.stmt) -> None: ...

    def _negated(self, test: ast.expr) -> None: ...

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None: ...

    def visit_If(self, node: ast.If) -> None:
        self._bodies(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._bodies(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self._bodies(node.body, node.orelse)

    def _bodies(self, *bodies: list[ast.stmt]) -> None:
        for body in bodies:
            for statement in body:
                self.visit(statement)

    def visit_BoolOp(self, node: ast.BoolOp) -> None: ...

    def visit_Constant(self, node: ast.Constant) -> None: ...

    def visit_Break(self, node: ast.Break) -> None: ...

    def visit_Continue(self, node: ast.Continue) -> None: ...

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not _counts(node):
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if _counts(node):
            return
        self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _is_number(node.target):
            return
        if isinstance(node.op, _ARITHMETIC) and not isinstance(node.value, ast.Constant) and _is_number(node.value):
            was = COMPUTED[type(node.op)][0]
            if was in _CHANGED:
                self._between(node.target, node.value, was, [_CHANGED[was]], "=")
        self.visit(node.value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        end = isinstance(node.operand, ast.Constant) or getattr(node.operand, "attr", "") == "inf"
        if isinstance(node.op, ast.USub) and not end and _is_number(node.operand):
            start = self.span(node)[0]
            self.add("- removed", (start, start + 1), "")
        self.visit(node.operand)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.op, _ARITHMETIC) or not _is_number(node):
            return
        was = COMPUTED[type(node.op)][0]
        if was in _CHANGED:
            self._between(node.left, node.right, was, [_CHANGED[was]])
        else:
            self.add("exponent x 1.1", self.span(node.right), f"({_FACTOR} * ({self.text(node.right)}))")
        for side in (node.left, node.right):
            if _is_constant(side) and not (was == "**" and side is node.right):
                self.add("constant x 1.1", self.span(side), f"({_FACTOR} * {self.text(side)})")
        self.visit(node.left)
        self.visit(node.right)


class WithDecisions(Formulas):
    """Look for arithmetic in numbers that are only compared as well."""

    def deciding(self, function: ast.FunctionDef) -> frozenset[str]:
        """Return no name."""
        return frozenset()


def _deciding(function: ast.FunctionDef) -> frozenset[str]:
    """Return the local names that are only compared, raised, counted with, or read by other such names."""
    stored: set[str] = set()
    read: dict[str, set[str | None]] = {}  # by whom: a name, '' for a comparison or a count, None for anything else

    def look(node: ast.AST, reader: str | None) -> None:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read.setdefault(node.id, set()).add(reader)
            else:
                stored.add(node.id)
            return
        if isinstance(node, ast.Compare | ast.Raise) or _reserves(node):
            reader = ""
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            reader = node.targets[0].id
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name):
            reader = node.target.id if reader is None else reader
        elif isinstance(node, ast.stmt):
            reader = None
        if isinstance(node, ast.If | ast.While | ast.Assert):
            look(node.test, "")
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "test", None) or isinstance(node, ast.IfExp):
                look(child, reader)

    given = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    for statement in function.body:
        look(statement, None)
    deciding = {name for name in stored - given if name in read}
    while others := {name for name in deciding if not read[name] <= deciding | {""}}:
        deciding -= others
    return frozenset(deciding)


def _counts(node: ast.AST) -> bool:
    """Whether what a node holds, a call or an argument by name, counts something or asks for memory."""
    if isinstance(node, ast.keyword):
        return (node.arg or "").strip("_") in _COUNTS
    return isinstance(node, ast.Call) and _called(node) in _COUNTS


def _reserves(node: ast.AST) -> bool:
    """Whether a node asks for memory, or is a count that is passed by name."""
    return _counts(node) and (isinstance(node, ast.keyword) or _called(cast(ast.Call, node)).startswith("check_"))


def _called(node: ast.Call) -> str:
    """Return the last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value != 0


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is arithmetic on values: not on counts, lists or texts, nor ``0 * x``, which is a type."""
    if isinstance(node, ast.BinOp):
        left, right = node.left, node.right
        if any(_is_zero(side) for side in (node, left, right)):
            return False
        counted = isinstance(right, ast.Constant) and right.value == 1 and isinstance(node.op, ast.Add | ast.Sub)
        if counted and isinstance(left, ast.Name | ast.Attribute):
            return False
    for part in ast.walk(node):
        if isinstance(part, ast.List | ast.Tuple | ast.JoinedStr | ast.Set | ast.FloorDiv | ast.Mod | ast.BitOr):
            return False
        if isinstance(part, ast.Constant) and not (isinstance(part.value, int | float) and not 0 < part.value < _GUARD):
            return False
        name = (part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")).lower().strip("_")
        if name in _COUNTS or name.endswith(_COUNTED):
            return False
    return True


def _is_zero(node: ast.expr) -> bool:
    """Whether an expression is ``0 * x``, which is there for its type."""
    return isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and node.left.value == 0


# ---- the claims as what is asked

_MAP = """
import json, sys, time
from coverage import Coverage
cover = Coverage(data_file=sys.argv[1], source=["nonlocal/nlflow"], branch=False, config_file=False)
cover.start()
from validation.harness import Context
from validation.runner import run_one, select
seconds = {}
for claim in select(sys.argv[2:]):
    cover.switch_context(claim.name + "|run")
    begun = time.process_time()
    if run_one(claim, Context(quick=True)).status == "pass":
        seconds[claim.name] = time.process_time() - begun
cover.stop()
cover.save()
json.dump(seconds, open(sys.argv[1] + ".json", "w"))
"""


def make_claims_map(folder: Path, root: Path = ROOT) -> list[Path]:
    """Run claims in their quick form in a copy of the checkout, which stays; return what `coverage` wrote, by age.

    Those whose own source is as it was in a copy that is there are not run again: lines that have moved are found.
    """
    kept = sorted(folder.glob("claims-map*/.coverage.json"), key=lambda path: (len(path.parent.name), path.parent.name))
    sources = {path.stem.replace("_", "-"): path for path in (root / "validation/claims").glob("[!_]*.py")}
    known = set()
    for path in kept:
        for name in json.loads(path.read_text()):
            then = path.parent / "validation/claims" / f"{name.replace('-', '_')}.py"
            if name in sources and then.read_bytes() == sources[name].read_bytes():
                known.add(name)
    if names := sorted(set(sources) - known):
        number = 1 + max((int(path.parent.name.rpartition("-")[2]) for path in kept), default=0)
        tree = folder / f"claims-map-{number}"
        copy(root, tree)
        environment = {**os.environ, "PYTHONPATH": f"{tree / 'nonlocal'}{os.pathsep}{tree}"}
        subprocess.run([sys.executable, "-c", _MAP, tree / ".coverage", *names], cwd=tree, env=environment, check=True)
        kept.append(tree / ".coverage.json")
    return [path.with_suffix("") for path in kept]


class Claims(Map):
    """From lines to the claims that pass without a change, in their quick form.

    Parameters
    ----------
    paths : sequence of Path
        What `make_claims_map` returns, the oldest first, with the seconds of each claim beside it in ``.json``.
    root : Path
        The checkout.
    """

    def __init__(self, paths: Sequence[Path], root: Path = ROOT) -> None:
        super().__init__(paths[-1], root)
        self._former = Claims(paths[:-1], root) if len(paths) > 1 else None
        own = json.loads(paths[-1].with_name(f"{paths[-1].name}.json").read_text())
        self.seconds: dict[str, float] = {**(self._former.seconds if self._former else {}), **own}

    def tests_of(self, mutant: Mutant) -> list[Batch]:
        """Return the claims that run the statement of a mutant, the shortest first."""
        names = sorted(self._claims_of(mutant), key=lambda name: self.seconds[name])
        return [(names, {name: self.seconds[name] for name in names})] if names else []

    def _claims_of(self, mutant: Mutant) -> set[str]:
        with self._lock:
            running = self._running({mutant.file: self._lines(mutant)}) & set(self.seconds)
        return running | (self._former._claims_of(mutant) if self._former else set())

    def ask(self, workshop: Workshop, batch: Batch, most: float, without: set[str]) -> Ran:
        """Run claims of a mutant until one does not pass."""
        return workshop.claims(batch[0], batch[1], most)
