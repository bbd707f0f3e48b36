"""Averages over pairs on tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from nlflow._array import numbers
from nlflow.backends.torch.attention import Form, attend, fused, log_sum_exp, offered, told, widened, width_for
from nlflow.backends.triton import radial
from nlflow.domains.mask import Sight
from nlflow.kernels import ExpDotProduct, Kernel, RadialKernel

_TILE_BYTES = 2**26
_WAITED = 2**28  # pairs whose time makes up for the seconds that Triton takes to compile a kernel
_STEEPEST = 1e4
"""Up to which scale of a dot product, and down to its inverse, half precision has a logit that is far below others."""
# Relative error of a weight from which squared distances are not taken out of squares any more.
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}
_LAW_ROUNDING = 2e-6  # of a weight, from which on laws are pushed in float64


class TorchSums:
    """Averages with the weights w_j k(x_i, y_j), and the logarithms of their sums; O(N (d + D)) memory."""

    # Averages have first derivatives with respect to queries, keys and values.
    # - queries, keys : (..., M, d), (..., N, d)
    # - weights : (N,) or (..., N), > 0
    # - precision : dtype to which features and values are rounded; that of the features by default
    # - fused : whether fused attention may be used
    # - present : bool (..., N), False at keys that have no weight
    # - seen : from a slice of queries to the keys that they see, bool (m, N), the same for all items
    # - causal : whether `seen` says j <= i
    # - table : whether `seen` is asked for as a whole and kept

    def __init__(
        self,
        kernel: Kernel,
        queries: Tensor,
        keys: Tensor,
        weights: Tensor | None = None,
        *,
        precision: str | None = None,
        fused: bool = True,
        present: Tensor | None = None,
        seen: Callable[[slice], Tensor] | None = None,
        causal: bool = False,
        table: bool = False,
    ) -> None:
        self._dtype: torch.dtype | None = None if precision is None else getattr(torch, precision)
        y = keys.to(self._dtype or keys.dtype)
        x = y if queries is keys else queries.to(y.dtype)
        self._kernel, self._x, self._y, self._weights = kernel, x, y, weights
        self._present, self._seen = present, seen
        self._form = Form(causal=causal)
        self._inner = seen is None or causal or table  # then all that are there see themselves
        self._far = False  # whether the last coordinate puts missing keys far below
        self._offset: Tensor | None = None
        if seen is not None and table:
            every = seen(slice(None))
            self._seen = every.__getitem__
            self._form = Form(bias=torch.zeros_like(every, dtype=y.dtype).masked_fill_(~every, -torch.inf))
        self.fused = fused and self._inner and offered(y) and self._fuse()
        if not self.fused:
            self._x, self._y = x, y
            if isinstance(kernel, RadialKernel) and y.dtype in (torch.float32, torch.float64):  # others are refused
                kernel.check_squares(torch.finfo(y.dtype))

    @property
    def how(self) -> str:
        if self.fused:
            pairs = self._x[..., 0].numel() * self._y.shape[-2]
            return f"fused by {told(self._x, self._form.bias is not None, pairs)}"
        name = type(self._kernel).__name__
        if not isinstance(self._kernel, ExpDotProduct):
            if not self._why_tiles:
                return f"by a Triton kernel of the formula of {name}, where there is no derivative"
            return f"in tiles: fused attention is for dot products and wide Gaussians, not for this {name}; " + (
                self._why_tiles
            )
        if not self._inner:
            return "in tiles: fused attention takes no rule of who sees whom"
        return f"in tiles: {told(self._y, self._form.bias is not None, 0)}"

    @cached_property
    def _why_tiles(self) -> str:
        """Why sums are not those of a Triton kernel of our own, or nothing."""
        x, y, kernel = self._x, self._y, self._kernel
        if self.fused or not isinstance(kernel, RadialKernel) or kernel.grows:
            return "Triton kernels are for weights that fall with the distance"
        if (
            x is not y or self._seen is not None or self._present is not None
        ):  # a node always sees itself, with weight 1
            return "Triton kernels take no masks, and the same points twice"
        if y[..., 0].numel() * y.shape[-2] < _WAITED:
            return f"a Triton kernel is compiled for {_WAITED} pairs or more"
        return radial.refusal(kernel, y)

    def _radial(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return sum_j w_j k_ij v_j and sum_j w_j k_ij of a Triton kernel."""
        shape, y = self._y.shape[:-1], self._y
        weights = y.new_ones(shape) if self._weights is None else self._weights.to(y.dtype).expand(shape)
        assert isinstance(self._kernel, RadialKernel)
        return radial.radial_sums(self._kernel, y, y, weights, values.expand(*shape, values.shape[-1]))

    @property
    def kept(self) -> tuple[Tensor, ...]:
        mean = self.__dict__.get("_mean_weight")
        return (self._x, self._y) if mean is None else (self._x, self._y, mean)

    def _fuse(self) -> bool:
        """Bring logits into the form scale q.k + offset_i; whether it was possible."""
        kernel, x, y, present = self._kernel, self._x, self._y, self._present
        if isinstance(kernel, ExpDotProduct):
            scale = _scale(kernel, y)
            self._form = replace(self._form, scale=scale)
            if present is None:
                return True
            if not 1 / _STEEPEST <= scale <= _STEEPEST:
                return False
            # One more coordinate, in which the missing ones are far below.
            self._far = True
            self._x = torch.cat([x, torch.full_like(x[..., :1], 1 / scale)], dim=-1)
            self._y = torch.cat([y, torch.zeros_like(y[..., :1]).masked_fill_(~present[..., None], _far(y))], dim=-1)
            return True
        kernel_width = kernel.gaussian_width if isinstance(kernel, RadialKernel) else None
        if kernel_width is None or y.dtype not in _ROUNDING:
            return False
        middle = y.detach().mean(dim=-2, keepdim=True)  # about which it cancels least
        x, y = (x - middle) / kernel_width, (y - middle) / kernel_width
        square_x, square_y = (x * x).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
        largest = float(torch.maximum(square_x.detach().max(), square_y.detach().max()))
        if not math.sqrt(y.shape[-1]) * largest * torch.finfo(y.dtype).eps <= _ROUNDING[y.dtype]:
            return False
        self._x = torch.cat([x, torch.ones_like(square_x)], dim=-1)
        lowered = -0.5 * square_y
        if present is not None:
            lowered = lowered.masked_fill(~present[..., None], _far(y))
        self._y = torch.cat([y, lowered], dim=-1)
        self._offset = -0.5 * square_x[..., 0]
        return True

    @property
    def wide(self) -> bool:
        return self._wide != self._y.dtype

    def average(self, values: Tensor) -> Tensor:
        """Return sum_j w_j k_ij v_j / sum_j w_j k_ij, (..., N, D) to (..., M, D)."""
        if self._dtype is None:
            return self._average(values)
        # Averages keep constants: what is rounded is the deviation from the middle, over the largest where the range of
        # the precision is short. The mean of what rounding took is put back: where values lie on the grid of the lower
        # precision, and the middle is small beside them, they are rounded back to what they were.
        middle = values.mean(dim=-2, keepdim=True)
        unit = _unit(values - middle) if self._dtype == torch.float16 else 1.0
        rounded = ((values - middle) / unit).to(self._dtype)
        middle = middle - rounded.mean(dim=-2, keepdim=True, dtype=values.dtype) * unit
        return self._average(rounded).to(values.dtype) * unit + middle

    def _average(self, values: Tensor) -> Tensor:
        if not self.fused:
            if not self._why_tiles and not self._tracked(values):
                sums, totals = self._radial(values)
                return sums / totals[..., None]
            return self._by_tiles(lambda logits, v: self._softmax(logits) @ v, values)
        if self._weights is None:
            return attend(self._x, self._y, values, self._form)
        # Weights are one more channel, and of the values a factor: no logit is rounded for them.
        weights, columns = self._column(self._weights), values.shape[-1]
        if width_for(self._x, columns + 1) > width_for(self._x, columns) and not self._tracked(values):
            return attend(self._x, self._y, weights * values, self._form) / self._mean_weight  # kernels stay narrow
        sums = attend(self._x, self._y, torch.cat([weights * values, weights], dim=-1), self._form)
        return sums[..., :-1] / sums[..., -1:]

    def log_totals(self) -> Tensor:
        """Return log sum_j w_j k_ij, (..., M), in float32 at least."""
        if not self.fused:
            if not self._why_tiles and not self._tracked():
                return torch.log(self._radial(self._y[..., :0])[1])
            return self._by_tiles(self._log_sum)
        if self._weights is None:
            result = log_sum_exp(self._x, self._y, self._form)
        elif not self._tracked():  # one pass gives both
            width = width_for(self._x, 1)
            q, k, weights = (widened(t, width) for t in (self._x, self._y, self._column(self._weights)))
            mean, logs = fused(q, k, weights, self._form)
            result = (logs + torch.log(mean[..., 0])).reshape(self._x.shape[:-1])
        else:
            mean = attend(self._x, self._y, self._column(self._weights), self._form)[..., 0]
            result = log_sum_exp(self._x, self._y, self._form) + torch.log(mean)
        return result if self._offset is None else result + self._offset

    @cached_property
    def _mean_weight(self) -> Tensor:
        """The averages of the weights, (..., M, 1): what averages of weights times values are divided by."""
        assert self._weights is not None
        return attend(self._x, self._y, self._column(self._weights), self._form)

    def push(self, law: Tensor) -> Tensor:
        """Return sum_i p_i w_j k_ij / d_i for all j, (..., M, D) to (..., N, D)."""
        # In tiles, whose rows are normalized as they are, which keeps the mass of the law. The derivative of fused
        # attention takes the degrees from their logarithms, which have lost as many digits as they are large.
        dtype = self._wide
        total = torch.zeros(*self._y.shape[:-1], law.shape[-1], dtype=torch.float64, device=law.device)
        for rows in self._tiles(dtype):
            weights = self._softmax(self._logits(self._x[..., rows, :], rows, dtype))
            total += weights.mT @ law[..., rows, :].to(dtype)
        return total.to(law.dtype)

    def log_totals_wide(self) -> Tensor:
        """Return log sum_j w_j k_ij, (..., M), in float64 where float32 would lose digits."""
        if self._wide != torch.float64 or self._tracked():
            return self.log_totals()
        parts = [
            self._log_sum(self._logits(self._x[..., rows, :], rows, self._wide)) for rows in self._tiles(self._wide)
        ]
        result = torch.cat(parts, dim=-1)
        return result if self._offset is None else result + self._offset

    @cached_property
    def _wide(self) -> torch.dtype:
        """The dtype in which logits that are formed from what is kept have no rounding that a law shows."""
        x, y = self._x.detach(), self._y.detach()
        if y.dtype == torch.float64:
            return y.dtype
        if isinstance(self._kernel, RadialKernel) and not self.fused:
            # Each node sees itself, with logit 0, beside which those that are large have no weight; or a rule says no.
            return torch.float32 if y.dtype == torch.float32 and self._inner else torch.float64
        x, y = (t[..., :-1] if self._far else t for t in (x, y))
        tops = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).max() for t in (x, y)]
        lengths = numbers(*tops)  # the device is asked once
        size = abs(self._form.scale if self.fused else _scale(self._kernel, y)) * lengths[0] * lengths[1]
        # Products of numbers in half precision have no more digits than float32 has.
        exact = size * torch.finfo(torch.float32).eps / 2 <= _LAW_ROUNDING
        return torch.float32 if exact else torch.float64

    def _column(self, weights: Tensor) -> Tensor:
        return weights.to(self._y.dtype)[..., None].expand(*self._y.shape[:-1], 1)

    def _logits(self, x: Tensor, rows: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Return log w_j k(x_i, y_j) for the queries x of some rows, (..., m, N); -inf where they see nothing.

        Where attention is fused without the offset of each row.
        """
        y, kernel = self._y, self._kernel
        if dtype is not None:
            x, y = x.to(dtype), y.to(dtype)
        if self.fused:
            logits = (x * self._form.scale) @ y.mT
        elif isinstance(kernel, RadialKernel):
            # Differences, not |x|^2 - 2 x.y + |y|^2: the expansion cancels for close points.
            squared = (x[..., :, None, 0] - y[..., None, :, 0]) ** 2
            for column in range(1, y.shape[-1]):
                squared = squared + (x[..., :, None, column] - y[..., None, :, column]) ** 2
            logits = kernel.log_profile(squared)
        else:
            logits = (x * _scale(kernel, y)) @ y.mT
        if self._weights is not None:
            logits = logits + torch.log(self._weights).to(logits.dtype)[..., None, :]
        if self._seen is not None:
            logits = logits.masked_fill(~self._seen(rows), -torch.inf)
        return logits if self._present is None else logits.masked_fill(~self._present[..., None, :], -torch.inf)

    def _filled(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits with rows of -inf alone set to 0, since they have no softmax; and which rows these are."""
        if self._seen is None and self._present is None:
            return logits, None
        empty = torch.isneginf(logits.detach().amax(dim=-1, keepdim=True))
        return logits.masked_fill(empty, 0.0), empty[..., 0]

    def _softmax(self, logits: Tensor) -> Tensor:
        return torch.softmax(self._filled(logits)[0], dim=-1)

    def _log_sum(self, logits: Tensor) -> Tensor:
        logits, empty = self._filled(logits)
        result = torch.logsumexp(logits, dim=-1)
        return result if empty is None else result.masked_fill(empty, -torch.inf)

    def _tiles(self, dtype: torch.dtype | None = None) -> list[slice]:
        count = self._x.shape[-2]
        row = self._y.numel() // self._y.shape[-1] * 4 * (dtype or self._y.dtype).itemsize
        step = max(1, min(count, _TILE_BYTES // row))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def _tracked(self, *values: Tensor) -> bool:
        inputs = [t for t in (self._x, self._y, self._weights, *values) if t is not None]
        return torch.is_grad_enabled() and any(t.requires_grad for t in inputs)

    def _by_tiles(self, reduce: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Return what `reduce` makes of the logits of each tile of queries, one after another."""
        tracked = self._tracked(*values)

        def tile(x: Tensor, rows: slice, *values: Tensor) -> Tensor:
            return reduce(self._logits(x, rows), *values)

        parts = []
        for rows in self._tiles():
            x = self._x[..., rows, :]
            parts.append(checkpoint(tile, x, rows, *values, use_reentrant=False) if tracked else tile(x, rows, *values))
        return torch.cat(parts, dim=-2 if values else -1)


def _far(like: Tensor) -> float:
    """Return a logit below all others, whose products are finite."""
    return -min(1e30, torch.finfo(like.dtype).max / 4)


def _scale(kernel: Kernel, y: Tensor) -> float:
    given: float | None = getattr(kernel, "scale", None)
    return 1 / math.sqrt(y.shape[-1]) if given is None else given


def _unit(values: Tensor) -> Tensor:
    """Return the largest size of each column, (..., 1, D); 1 where all are 0."""
    largest = values.detach().abs().amax(dim=-2, keepdim=True)
    return torch.where(largest > 0, largest, torch.ones_like(largest))


_LEAST_BLOCK = 64  # queries; below, the products are too small to pay
_ALIGNED = 8  # keys; what fused kernels on GPUs want of a table of biases


class MaskedSums:
    """Averages over the keys that a query sees; the methods are those of `TorchSums`."""

    # Windows take O(N window) time and memory, rules O(N^2) evaluations at each average.

    def __init__(
        self, kernel: Kernel, queries: Tensor, keys: Tensor, weights: Tensor | None, sight: Sight, precision: str | None
    ) -> None:
        mask, present = sight.mask, sight.present
        self._missing = None if present is None else ~present
        self._rounds = precision is not None
        self._logs = None if weights is None else torch.log(weights)
        if present is not None:
            # What lies at missing nodes shall not matter, to the precision of the others neither.
            same = queries is keys
            keys = _filled(keys, present)
            queries = keys if same else _filled(queries, present)
        band = mask.rule is None and mask.window is not None
        # In the other order, what comes later comes before.
        self._flipped = mask.rule is None and mask.causal and sight.reversed and not band
        if self._flipped:
            queries, keys = queries.flip(-2), keys.flip(-2)
            weights = None if weights is None else weights.flip(-1)
            present = None if present is None else present.flip(-1)
            sight = sight.transposed()
        every = sight.numbers()

        def seen(rows: slice) -> Tensor:
            result: Tensor = sight.pairs(sight.numbers(rows)[:, None], every)
            return result

        self._sums = _BandSums(kernel, queries, keys, weights, sight, precision) if band else TorchSums(
            kernel, queries, keys, weights, precision=precision, present=present,
            seen=seen if mask.causal or mask.rule is not None else None, causal=mask.causal and mask.rule is None,
        )  # fmt: skip
        self.fused = self._sums.fused

    @property
    def how(self) -> str:
        return self._sums.how

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self._sums.kept

    @property
    def wide(self) -> bool:
        """See `TorchSums.wide`."""
        return self._sums.wide

    def _ordered(self, values: Tensor, axis: int = -2) -> Tensor:
        return values.flip(axis) if self._flipped else values

    def average(self, values: Tensor) -> Tensor:
        """See `TorchSums.average`."""
        if self._missing is None:
            return self._ordered(self._sums.average(self._ordered(values)))
        # Where deviations from the mean are rounded, missing nodes are no part of it.
        there = _filled(values, ~self._missing) if self._rounds else values
        result = self._ordered(self._sums.average(self._ordered(there)))
        return torch.where(self._missing[..., None], values, result)

    def log_totals(self) -> Tensor:
        """See `TorchSums.log_totals`."""
        return self._with_missing(self._ordered(self._sums.log_totals(), -1))

    def log_totals_wide(self) -> Tensor:
        """See `TorchSums.log_totals_wide`."""
        return self._with_missing(self._ordered(self._sums.log_totals_wide(), -1))

    def _with_missing(self, result: Tensor) -> Tensor:
        """Return logarithms of sums with those of missing nodes, which see themselves alone."""
        if self._missing is None:
            return result
        own = torch.zeros_like(result) if self._logs is None else self._logs.to(result.dtype)
        return torch.where(self._missing, own, result)

    def push(self, law: Tensor) -> Tensor:
        """See `TorchSums.push`."""
        if self._missing is None:
            return self._ordered(self._sums.push(self._ordered(law)))
        missing = self._missing[..., None]
        arrived = self._sums.push(self._ordered(law.masked_fill(missing, 0.0)))
        return torch.where(missing, law, self._ordered(arrived))


def _filled(x: Tensor, present: Tensor) -> Tensor:
    """Return features with those of missing nodes replaced by the mean of the others."""
    there = present[..., None]
    total = torch.where(there, x, torch.zeros_like(x)).sum(-2, keepdim=True)
    return torch.where(there, x, (total / there.sum(-2, keepdim=True).clamp(min=1)).detach())


class _BandSums:
    """Averages over the keys within a window: blocks of queries, each with the keys that one of them may see.

    FlexAttention does the same from a compiled description; it needs a compiler where it runs, and has no float64.
    """

    def __init__(
        self, kernel: Kernel, queries: Tensor, keys: Tensor, weights: Tensor | None, sight: Sight, precision: str | None
    ) -> None:
        mask, self._count = sight.mask, int(queries.shape[-2])
        if isinstance(kernel, RadialKernel):  # so that the zeros beyond the ends lie among the keys
            middle = keys.detach().mean(dim=-2, keepdim=True)
            queries, keys = queries - middle, keys - middle
        window = min(int(mask.window or 0), self._count - 1)
        before = 0 if mask.causal and sight.reversed else window
        after = 0 if mask.causal and not sight.reversed else window
        self._size = _aligned(min(max(window, _LEAST_BLOCK), self._count))
        self._blocks = -(-self._count // self._size)
        self._before, self._width = before, _aligned(before + self._size + after)

        def seen(rows: slice) -> Tensor:
            i = torch.arange(self._size, device=keys.device)[rows, None]
            j = torch.arange(self._width, device=keys.device) - before
            return (i - j <= before) & (j - i <= after)

        there = torch.ones_like(keys[..., 0]) if sight.present is None else sight.present.to(keys.dtype)
        nearby = None
        if weights is not None:
            nearby = self._unfolded(weights[:, None])[..., 0]
            nearby = torch.where(nearby > 0, nearby, torch.ones_like(nearby))  # beyond the ends, where nothing is
        self._sums = TorchSums(
            kernel, self._blocked(queries), self._unfolded(keys), nearby, precision=precision,
            present=self._unfolded(there[..., None])[..., 0] > 0, seen=seen, table=True,
        )  # fmt: skip
        self.fused = self._sums.fused

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self._sums.kept

    @property
    def how(self) -> str:
        return f"in blocks of {self._size} nodes and what they see, {self._sums.how}"

    @property
    def wide(self) -> bool:
        return self._sums.wide

    def _blocked(self, values: Tensor) -> Tensor:
        """Return (..., N, D) as (..., blocks, size, D)."""
        whole = pad(values, (0, 0, 0, self._blocks * self._size - self._count))
        return whole.reshape(*values.shape[:-2], self._blocks, self._size, values.shape[-1])

    def _unfolded(self, values: Tensor) -> Tensor:
        """Return (..., N, D) as (..., blocks, width, D): for each block the keys that its queries may see."""
        after = (self._blocks - 1) * self._size + self._width - self._before - self._count
        return pad(values, (0, 0, self._before, after)).unfold(-2, self._width, self._size).mT.contiguous()

    def _folded(self, values: Tensor) -> Tensor:
        """Return (..., blocks, width, D) added up at the keys that they belong to, (..., N, D)."""
        pieces = -(-self._width // self._size)
        values = pad(values, (0, 0, 0, pieces * self._size - self._width))
        values = values.reshape(*values.shape[:-2], pieces, self._size, values.shape[-1])
        total = values.new_zeros(*values.shape[:-4], (self._blocks + pieces) * self._size, values.shape[-1])
        for piece in range(pieces):  # those of all blocks lie side by side: the same order of sums on any device
            start = piece * self._size
            total[..., start : start + self._blocks * self._size, :] += values[..., piece, :, :].flatten(-3, -2)
        return total[..., self._before : self._before + self._count, :]

    def average(self, values: Tensor) -> Tensor:
        return self._sums.average(self._unfolded(values)).flatten(-3, -2)[..., : self._count, :]

    def log_totals(self) -> Tensor:
        return self._sums.log_totals().flatten(-2, -1)[..., : self._count]

    def log_totals_wide(self) -> Tensor:
        return self._sums.log_totals_wide().flatten(-2, -1)[..., : self._count]

    def push(self, law: Tensor) -> Tensor:
        return self._folded(self._sums.push(self._blocked(law)))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
