"""Masks: which nodes a node sees."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np

from nlflow._array import Array, is_tensor, namespace
from nlflow.errors import (
    InputError,
    check_flag,
    check_integer,
    check_tensor,
    check_unmasked,
    is_function,
    kind_of,
    warn_caller,
)

_BLOCK = 2**22  # pairs of which a rule is asked at a time


@dataclass(frozen=True, eq=False)
class Mask:
    """Which nodes j a node i sees: those that all parameters let it see; k_ij = 0 for the others.

    Parameters
    ----------
    causal : bool
        Nodes see those with j <= i; k is not symmetric then.
    window : int, optional
        Nodes see those with abs(i - j) <= window. For torch features, ``method='tiled'`` and no rule an average costs
        O(N window).
    present : array of bool, shape (N,) or, on a `Batch`, ``leading + (N,)``, optional
        False at padding, which sees itself alone and is seen by no other node. It needs finite features, and counts in
        means over the domain.
    rule : callable, optional
        ``rule(i, j)`` for integer arrays that broadcast (of NumPy or torch, as the features are), True where i sees j.
        It is asked of all N^2 pairs.

    Warns
    -----
    NlflowWarning
        If a rule lets a node see nobody; it then sees itself alone.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import ExpDotProduct, Mask, Points, affinity
    >>> x = np.zeros((4, 2))  # all alike: averages are means of what is seen
    >>> p = affinity(ExpDotProduct(), Points(np.arange(4.0)), x, mask=Mask(causal=True))
    >>> p.average(np.array([0.0, 2.0, 4.0, 6.0])).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """

    causal: bool = False
    window: int | None = None
    present: Array | None = None
    rule: Callable[[Array, Array], Array] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal", check_flag("causal", self.causal))
        if self.window is not None:
            object.__setattr__(self, "window", check_integer("window", self.window, minimum=0))
        if self.rule is not None and not is_function(self.rule):
            raise InputError(f"rule: got {self.rule!r}, expected a function of two arrays of node numbers")
        if self.present is not None:
            check_unmasked("present", self.present)
            if is_tensor(self.present):
                check_tensor("present", self.present)
            kind = str(getattr(self.present, "dtype", type(self.present).__name__))
            if "bool" not in kind or not getattr(self.present, "ndim", 0):
                raise InputError(
                    f"present: got {kind}, expected an array of bool, True where there is a node; compare first "
                    "(attention_mask == 1)"
                )
            # A copy: a mask does not change when the array that it was made from does.
            object.__setattr__(self, "present", namespace(self.present).asarray(self.present, copy=True))

    def item(self, index: tuple[int, ...], leading: tuple[int, ...]) -> Mask:
        """Return the mask of one item of a batch."""
        if self.present is None:
            return self
        present = namespace(self.present).broadcast_to(self.present, (*leading, self.present.shape[-1]))
        return Mask(self.causal, self.window, present[index], self.rule)


def check_mask(value: Any) -> Mask | None:
    if value is not None and not isinstance(value, Mask):
        raise InputError(f"mask: got {kind_of(value)}, expected a Mask, such as Mask(causal=True)")
    return value


def check_present(present: Array, leading: tuple[int, ...], count: int) -> None:
    got, full = tuple(present.shape), (*leading, count)
    pairs = zip(reversed(got[:-1]), reversed(leading), strict=False)
    if got[-1:] != full[-1:] or len(got) > len(full) or any(g not in (1, n) for g, n in pairs):
        raise InputError(f"mask: present has shape {got}, expected {full}, one for each node")


class Sight:
    """A mask on `count` nodes, in the namespace and on the device of the features."""

    def __init__(self, mask: Mask, leading: tuple[int, ...], count: int, like: Array) -> None:
        self.mask, self.reversed = mask, False
        self._count, self._device = count, array_api_compat.device(like)
        self._kind = namespace(like).empty(0, device=self._device)  # which tells the namespace, and can be pickled
        self.present: Array | None = None if mask.present is None else self._place(mask.present, leading)
        self._alone: Array | None = None
        self.symmetric = not mask.causal
        if mask.rule is not None:
            self._ask()

    @property
    def _xp(self) -> Any:
        return namespace(self._kind)

    def _place(self, present: Array, leading: tuple[int, ...]) -> Array | None:
        check_present(present, leading, self._count)
        xp = self._xp
        host = present.cpu().numpy() if is_tensor(present) and xp.__name__.endswith("numpy") else present
        result = xp.asarray(host, device=self._device)
        nobody = ~xp.any(result, axis=-1)
        if bool(xp.any(nobody)):
            which = np.argwhere(np.asarray(nobody.tolist()))[0] if leading else []
            where = f" of item {tuple(int(i) for i in which)}" if len(which) else ""
            warn_caller(f"mask: no node{where} is present; all of them stay where they are")
        return None if bool(xp.all(result)) else result

    def numbers(self, rows: slice | None = None) -> Array:
        start, stop, _ = (rows or slice(None)).indices(self._count)
        return self._xp.arange(start, stop, device=self._device)

    def _ask(self) -> None:
        """Find the nodes that a rule leaves without any, and whether it is symmetric: O(N^2)."""
        xp, every, present = self._xp, self.numbers(), self.present
        items = 1 if present is None else math.prod(present.shape[:-1])
        step = max(1, _BLOCK // (self._count * items))
        empty = []
        for start in range(0, self._count, step):
            rows = self.numbers(slice(start, start + step))[:, None]
            if start == 0:
                self._check_rule(rows, every)
            seen = self.pairs(rows, every)
            self.symmetric = self.symmetric and bool(xp.all(seen == self.pairs(every, rows)))
            empty.append(~xp.any(seen if present is None else seen & present[..., None, :], axis=-1))
        alone = xp.concat(empty, axis=-1)
        if present is not None:
            alone = alone & present
        count = int(xp.count_nonzero(alone))
        if count:
            index = np.unravel_index(int(xp.argmax(xp.reshape(xp.astype(alone, xp.int32), (-1,)))), tuple(alone.shape))
            first = int(index[0]) if len(index) == 1 else tuple(int(i) for i in index)
            warn_caller(
                f"mask: {count} of {math.prod(alone.shape)} nodes see no node (the first is {first}); each sees itself "
                "alone, and stays where it is",
            )
            self._alone = alone

    def _check_rule(self, i: Array, j: Array) -> None:
        assert self.mask.rule is not None
        try:
            seen: Any = self.mask.rule(i, j)
        except Exception as error:
            raise InputError(
                f"rule: it raised {type(error).__name__} ({error}) for arrays of node numbers of shapes "
                f"{tuple(i.shape)} and {tuple(j.shape)}, expected a function of them"
            ) from error
        kind, got = str(getattr(seen, "dtype", type(seen).__name__)), tuple(getattr(seen, "shape", ()))
        whole = (i.shape[0], j.shape[0])
        fits = len(got) < 3 and all(g in (1, n) for g, n in zip(reversed(got), reversed(whole), strict=False))
        if not fits or "bool" not in kind or (got and is_tensor(seen) is not is_tensor(i)):
            raise InputError(
                f"rule: got {kind} of shape {got}, expected bool of shape {whole}, in {kind_of(i)} as the numbers are"
            )

    def transposed(self) -> Sight:
        result = copy.copy(self)
        result.reversed = not self.reversed
        return result

    def item(self, index: tuple[int, ...], leading: tuple[int, ...]) -> Sight:
        result = copy.copy(self)
        whole = (*leading, self._count)
        if self.present is not None:
            result.present = self._xp.broadcast_to(self.present, whole)[index]
            if self._alone is not None:
                result._alone = self._xp.broadcast_to(self._alone, whole)[index]
        return result

    def pairs(self, i: Array, j: Array) -> Array:
        """Return whether node i sees node j if both are there, for arrays of node numbers that broadcast."""
        if self.reversed:
            i, j = j, i
        mask, xp = self.mask, self._xp
        seen: Any = (i >= 0) & (j >= 0)
        if mask.rule is not None:
            seen = seen & mask.rule(i, j)
        if mask.causal:
            seen = seen & (j <= i)
        if mask.window is not None:
            seen = seen & (xp.abs(i - j) <= mask.window)
        if self._alone is not None:
            i, j = self._xp.broadcast_arrays(i, j)
            seen = seen | ((i == j) & self._alone[..., i])
        return seen

    def applied(self, logits: Array, rows: slice) -> Array:
        """Return logits (m, N) of some rows of one item with -inf where nothing is seen."""
        xp, i, j = self._xp, self.numbers(rows)[:, None], self.numbers()
        seen = self.pairs(i, j)
        if self.present is not None:
            seen = seen & self.present[rows][:, None] & self.present
        logits = xp.where(seen, logits, -np.inf)
        if self.present is None:
            return logits
        alone = (i == j) & ~self.present
        return xp.where(alone, 0.0, logits)
