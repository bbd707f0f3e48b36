"""Mutants: one small wrong change of the code each, with a name that stays while its function stays.

The operators are the usual ones, on Python's own `ast`. Those of the two tools at hand do not fit. mutmut 3 puts all
mutants of a function into one file, behind a function that chooses; it leaves out what is decorated, and so each
compiled loop. cosmic-ray 8 exchanges any operator for any other: of the 12 600 mutants that it finds in the flow, the
functionals and the affinities, 4 100 apply an operation on bits, which floats refuse, and 340 change the ``*`` of a
signature; it mutates annotations, and removes no statement. Both number their mutants by file, so that a change of one
function renames those of all below.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COMPUTED", "SCOPE", "Finder", "Mutant", "draw", "mutants_of", "mutants_under", "part_of"]

SOURCE = "nonlocal/nlflow"
SCOPE = ("functionals", "flows/flow", "flows/linear", "flows/gradient", "flows/integrators",
         "flows/spectrum", "flows/p_flow", "affinities", "markov", "equilibria", "denoising",
         "backends/numba")  # fmt: skip
"""Modules and folders of the package that are mutated."""

_OUTSIDE = ("backends/numba/loading.py",)  # compiles loops and takes the time of it
# Names of what has no right value: signatures of loops, sizes of pieces, presets.
_NAMES = re.compile(r"__all__|_LOOPS|\w*(BLOCK|TILE|CHUNK|STRIP|LINE|JOBS|RUN)\w*|\w*bytes\w*|PRESETS|_SIGNAL_\w+")
_FUNCTIONS = re.compile(r"__repr__|__str__|\w*bytes\w*")  # texts, and memory that is taken at most, generously
_TEXT = {"warn", "TypeVar", "NewType", "cast"}  # calls whose arguments are for people or for mypy
_ORDERED = {"isinstance", "hasattr", "getattr", "setattr"}  # the other way round they always fail

_COMPARED = {
    ast.Lt: ("<", ("<=", ">=")), ast.LtE: ("<=", ("<", ">")), ast.Gt: (">", (">=", "<=")), ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)), ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)), ast.NotIn: ("not in", ("in",)),
}  # fmt: skip
COMPUTED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"),
}  # fmt: skip
_CALLED = {"min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all", "floor": "ceil"}
_CALLED |= {after: before for before, after in _CALLED.items()}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes
    ----------
    file : str
        Relative to the checkout.
    function : str
        Qualified name; '' at the level of the module.
    operator : str
        What was changed into what.
    occurrence : int
        Of the operator in the function, from 0.
    line : int
        Where it is, from 1.
    first : int
        First line of the statement.
    span : tuple of int
        Bytes of the source that are replaced.
    text : str
        What replaces them.
    """

    file: str
    function: str
    operator: str
    occurrence: int
    line: int
    first: int
    span: tuple[int, int]
    text: str

    @property
    def name(self) -> str:
        """Which tells it apart from all others."""
        return f"{self.file}:{self.function}:{self.operator}:{self.occurrence}"

    def applied(self, source: bytes) -> bytes:
        """Return the mutated source."""
        return source[: self.span[0]] + self.text.encode() + source[self.span[1] :]

    def change(self, source: bytes) -> str:
        """Return the lines before and after as one line of text."""
        start = source.rfind(b"\n", 0, self.span[0]) + 1
        end = source.find(b"\n", self.span[1])
        after = source[start : self.span[0]] + self.text.encode() + source[self.span[1] : end]
        return " -> ".join(" ".join(text.decode().split()) for text in (source[start:end], after))


def part_of(file: str, scope: Sequence[str] = SCOPE) -> str:
    """Return the entry of a scope that a file belongs to; '' for a file outside."""
    path = file.removeprefix(SOURCE + "/").removesuffix(".py")
    return next((part for part in scope if f"{path}/".startswith(f"{part}/")), "")


def mutants_under(
    root: Path, scope: Sequence[str] = SCOPE, finder: Callable[[bytes, Sequence[int]], Finder] | None = None
) -> list[Mutant]:
    """Return all mutants of the files in scope under a checkout."""
    found = []
    for path in sorted((root / SOURCE).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if part_of(file, scope) and not file.endswith(_OUTSIDE):
            found += mutants_of(path.read_bytes(), file, finder)
    return found


def draw(mutants: Sequence[Mutant], number: int, seed: int, scope: Sequence[str] = SCOPE) -> list[Mutant]:
    """Draw mutants: those whose names have the smallest hashes, in each part of the scope by itself.

    The share of a part grows with the square root of its mutants. So a change in one function exchanges its own mutants
    and hardly any other.
    """
    parts: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        parts.setdefault(part_of(mutant.file, scope), []).append(mutant)
    drawn = []
    for part, share in _shares({part: len(parts[part]) for part in scope if part in parts}, number).items():
        drawn += sorted(parts[part], key=lambda mutant: hashlib.sha256(f"{seed}:{mutant.name}".encode()).digest())[
            :share
        ]
    return drawn


def _shares(sizes: Mapping[str, int], number: int) -> dict[str, int]:
    """Divide a number by square roots, to whole numbers by largest remainders."""
    total = sum(map(math.sqrt, sizes.values()))
    exact = {part: number * math.sqrt(size) / total for part, size in sizes.items()}
    shares = {part: int(share) for part, share in exact.items()}
    for part in sorted(exact, key=lambda part: shares[part] - exact[part])[: number - sum(shares.values())]:
        shares[part] += 1
    return shares


def mutants_of(
    source: bytes, file: str, finder: Callable[[bytes, Sequence[int]], Finder] | None = None
) -> list[Mutant]:
    """Return all mutants of one source, in its order; `Finder` looks for them where no other is given."""
    starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]
    looks = (finder or Finder)(source, starts)
    looks.visit(ast.parse(source))
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for function, operator, first, span, text in looks.found:
        line = source.count(b"\n", 0, span[0]) + 1
        found.append(Mutant(file, function, operator, counts[function, operator], line, first, span, text))
        counts[function, operator] += 1
    return found


class Finder(ast.NodeVisitor):
    """Look for what can be changed; what is not a number or a decision is not visited."""

    def __init__(self, source: bytes, starts: Sequence[int]) -> None:
        self.source, self.starts = source, starts
        self.names: list[str] = []
        self.inside = False  # a function
        self.first = 1
        self.found: list[tuple[str, str, int, tuple[int, int], str]] = []

    def add(self, operator: str, span: tuple[int, int], text: str) -> None:
        self.found.append((".".join(self.names), operator, self.first, span, text))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end = self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return self.starts[node.lineno - 1] + node.col_offset, end

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.source[slice(*self.span(node))].decode()

    def _between(self, left: ast.expr, right: ast.expr, was: str, texts: Sequence[str], more: str = "") -> None:
        """Exchange an operator, which is between its operands, beside parentheses."""
        low, high = self.span(left)[1], self.span(right)[0]
        match = re.search(r"\s+".join(map(re.escape, was.split())) + re.escape(more), self.source[low:high].decode())
        if match is None or b"#" in self.source[low:high]:
            return
        for text in texts:
            self.add(f"{was}{more} to {text}{more}", (low + match.start(), low + match.end()), text + more)

    def _negated(self, test: ast.expr) -> None:
        """Negate a condition, where no other operator does."""
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1) and not _is_not(test):
            self.add("condition negated", self.span(test), f"(not ({self.text(test)}))")

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.first = node.lineno
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if _FUNCTIONS.fullmatch(node.name):
            return
        self.names.append(node.name)
        before, self.inside = self.inside, True
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.inside = before
        self.names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assignment(node.targets, node.value)
        if not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets):
            self._removed(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assignment([node.target], node.value)

    def _assignment(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        """Look at a value; of single numbers that have names of their own only at those within functions."""
        if any(isinstance(target, ast.Name) and _NAMES.fullmatch(target.id) for target in targets):
            return
        if self.inside or isinstance(value, ast.Tuple | ast.List | ast.Dict):
            for target in targets:
                self.visit(target)
            self.visit(value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in COMPUTED:
            was, becomes = COMPUTED[type(node.op)]
            self._between(node.target, node.value, was, [becomes], "=")
        self._removed(node)
        self.visit(node.target)
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._removed(node)
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._removed(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.add("break to continue", self.span(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("continue to break", self.span(node), "break")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add("returned value to None", self.span(node.value), "None")
            self.visit(node.value)

    def _removed(self, node: ast.stmt) -> None:
        self.add("statement removed", self.span(node), "pass")

    def visit_If(self, node: ast.If) -> None:
        if self.text(node.test) != "TYPE_CHECKING":
            self._negated(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negated(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operation, right in zip(node.ops, node.comparators, strict=True):
            was, texts = _COMPARED[type(operation)]
            self._between(left, right, was, texts)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        was, becomes = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, was, [becomes])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in COMPUTED and not (_is_text(node.left) or _is_text(node.right)):
            was, becomes = COMPUTED[type(node.op)]
            self._between(node.left, node.right, was, [becomes])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        was = {ast.USub: "-", ast.Not: "not", ast.Invert: "~"}.get(type(node.op))
        if was is not None:
            self.add(f"{was} removed", (self.span(node)[0], self.span(node)[0] + len(was)), "")
        self.visit(node.operand)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _TEXT:
            return
        if name in _CALLED:
            end = self.span(node.func)[1]
            self.add(f"{name} to {_CALLED[name]}", (end - len(name), end), _CALLED[name])
        elif (
            name not in _ORDERED
            and len(node.args) > 1
            and not any(isinstance(argument, ast.Starred) for argument in node.args[:2])
        ):
            one, two = node.args[:2]
            if self.text(one) != self.text(two) and not _is_text(one):
                between = self.source[self.span(one)[1] : self.span(two)[0]].decode()
                self.add("arguments swapped", (self.span(one)[0], self.span(two)[1]),
                          self.text(two) + between + self.text(one))  # fmt: skip
        self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            if not (name == "zip" and isinstance(argument, ast.keyword)):  # strict, which is there for who reads
                self.visit(argument)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(f"{value} to {not value}", self.span(node), str(not value))
        elif isinstance(value, int | float):
            for by in (1, -1):
                if value + by != value:
                    text = repr(value + by)
                    self.add(f"number {by:+d}", self.span(node), f"({text})" if value + by < 0 else text)


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
