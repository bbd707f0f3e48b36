"""Matrices of projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.blocks import TORCH, Block, heads_of
from nlflow.attention.threads import OfThread, evaluating, tracing
from nlflow.errors import InputError


class UnknownError(Exception):
    """Unknown maps."""


class LayoutError(InputError):
    """Averages of unknown columns."""


# ---- projections


def weight_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the matrix (in, out) and the bias of a projection, with their graphs; `UnknownError` where not known.

    Of torch's attention it is that of the values.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    name = type(module).__name__
    if hasattr(module, "base_layer"):  # of PEFT, around a projection
        width = getattr(module, "in_features", None)
        _check_plain(name, getattr(module.base_layer, "weight", None))
        if not isinstance(width, int):
            raise UnknownError(f"{name} is no linear map that is known")
        one = next(module.parameters())
        with evaluating(module):  # its dropout is no part of the map
            shift = module.forward(torch.zeros(1, width, dtype=one.dtype, device=one.device))
            return module.forward(torch.eye(width, dtype=one.dtype, device=one.device)) - shift, shift[0]
    if isinstance(module, nn.MultiheadAttention):
        weight, bias = weight_in_torch(module)
    _check_plain(name, weight)
    assert isinstance(weight, Tensor)
    bias = bias if isinstance(bias, Tensor) else None
    if isinstance(module, nn.Linear | nn.MultiheadAttention):
        return weight.T, bias
    if isinstance(getattr(module, "nf", None), int):  # GPT-2's Conv1D
        return weight, bias
    if weight.ndim > 2 and weight[0, 0].numel() == 1:  # convolutions of one point
        return weight.flatten(1).T, bias
    if weight.ndim == 2 and hasattr(module, "in_features"):
        return weight.T, bias
    raise UnknownError(f"{name} is no linear map that is known")


def weight_in_torch(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor | None]:
    """Return W_V as torch has it, (out, in), and its bias."""
    size = module.embed_dim
    fused: Any = module.in_proj_weight
    biases: Any = module.in_proj_bias
    return module.v_proj_weight if fused is None else fused[2 * size :], None if biases is None else biases[2 * size :]


PLAIN: tuple[type, ...] = (nn.Parameter, Tensor)  # what holds quantised weights is a class of its own


def _check_plain(name: str, weight: Any) -> None:
    if type(weight) not in PLAIN or not weight.is_floating_point() or weight.element_size() < 2:
        kind = f"by {weight.__module__}" if callable(weight) else getattr(weight, "dtype", type(weight).__name__)
        raise UnknownError(f"the weights of {name} are quantised or packed ({kind}); load the model in float32")


# ---- where values lie: by their bits where they are seen, else by their averages

_ROWS = 16  # tokens by which columns are compared


def columns_of(made: Tensor, values: Tensor) -> Tensor | slice | None:
    """Return which columns of `made` (B, N, C) are the values (B, G, N, d), (G d,); None where not all are there."""
    wanted = values.transpose(1, 2).flatten(2)
    if made.shape[:2].numel() != wanted.shape[:2].numel() or made.dtype != wanted.dtype:
        return None
    made, wanted = (one.detach().flatten(0, -2) for one in (made, wanted))
    if wanted.is_set_to(made):
        return slice(None)  # one memory
    rows = torch.linspace(0, len(made) - 1, min(_ROWS, len(made)), device=made.device).long()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[made.element_size()]
    factors = torch.randint(2**62, (len(rows), 1), generator=torch.Generator().manual_seed(0)).to(made.device) | 1
    keys, sought = (
        (one[rows].contiguous().view(integers).long() * factors).sum(0) for one in (made, wanted)
    )  # fmt: skip
    order = keys.argsort(stable=True, descending=True)
    ascending = keys[order].flip(0)
    places = torch.searchsorted(ascending, sought).clamp_max(len(keys) - 1)
    columns = order.flip(0)[places]
    return columns if torch.equal(made[:, columns], wanted) else None


LAYOUTS = ("alone", "behind", "heads", "quarters")


def fits(layout: str, made: int, used: int, heads: int) -> bool:
    if layout == "alone":
        return made == used or _serves(made, used, heads)
    if layout == "behind":
        size = (made - used) // 2
        return made == used + 2 * size and (size == used or _serves(size, used, heads))
    if layout == "quarters":
        return made == 3 * used and used % 4 == 0
    return made == 3 * used and heads > 0 and used % heads == 0


def _serves(size: int, used: int, heads: int) -> bool:
    """Return whether heads of values of `size` columns serve several heads of queries of `used` columns each."""
    if heads <= 0 or used % heads:
        return False
    return 0 < size < used and size % (used // heads) == 0 and used % size == 0


def part(made: Tensor, layout: str, used: int, heads: int) -> Tensor:
    if layout == "heads":
        return made.reshape(*made.shape[:-1], heads, 3, used // heads)[..., 2, :].flatten(-2)
    if layout == "quarters":
        return made.reshape(*made.shape[:-1], 4, 3, used // 4)[..., 1, :].flatten(-2)
    values = made if layout == "alone" else made[..., made.shape[-1] - (made.shape[-1] - used) // 2 :]
    if values.shape[-1] == used:
        return values
    several = values.reshape(*values.shape[:-1], -1, used // heads)
    return several.repeat_interleave(used // values.shape[-1], dim=-2).flatten(-2)


_OFF, _OFF_HALF = 1e-4, 2e-2  # of the largest value: beyond all rounding


class Layout:
    """Where values lie in what their projection makes.

    It is the first layout in which each average lies between the least and the largest of what is averaged.
    """

    def __init__(self) -> None:
        self.name = ""
        self._made = OfThread()

    def hooks(self, block: Block) -> list[Any]:
        heads, label = heads_of(block.module), f"{block.name} ({type(block.module).__name__})"

        def take(module: nn.Module, args: Any, output: Any) -> None:
            if not self.name and isinstance(output, Tensor) and _watches(block.module):
                self._made.set(output.detach())

        def give(module: nn.Module, args: Any) -> None:
            made = self._made.take()
            if not self.name and made is not None and _watches(block.module):
                self.find(made, args[0].detach(), heads, label)

        assert block.values is not None
        assert block.projection is not None
        return [
            block.values.register_forward_hook(take, prepend=True),
            block.projection.register_forward_pre_hook(give, prepend=True),  # before terms are added
        ]

    def find(self, made: Tensor, averages: Tensor, heads: int, label: str) -> None:
        if made.ndim < 3 or made.ndim != averages.ndim or made.shape[:-1] != averages.shape[:-1]:
            return  # rows in another arrangement
        made, averages, used = made.flatten(1, -2), averages.flatten(1, -2), averages.shape[-1]
        if not bool(torch.isfinite(made).all()):
            return
        off = _OFF if made.element_size() >= 4 else _OFF_HALF
        for layout in LAYOUTS:
            if not fits(layout, made.shape[-1], used, heads):
                continue
            values = part(made, layout, used, heads)
            near = off * values.abs().amax()
            low, high = (bound(dim=1, keepdim=True) for bound in (values.amin, values.amax))
            if bool(((averages >= low - near) & (averages <= high + near)).all()):
                self.name = layout
                return
        raise LayoutError(
            f"model: got {label}, whose averages do not lie between columns of what its projection of values "
            "makes (a fused one of unknown layout, values that are normed or scaled, or a gate), expected rows of P "
            "with sum 1 over such columns; leave it out with adapter=, or take a cure without W_V W_O"
        )


def _watches(module: nn.Module) -> bool:
    return not (tracing() or torch.compiler.is_compiling() or module.training)  # dropout makes other averages


# ---- the product


@dataclass(frozen=True, eq=False)
class Product:
    """What attention adds to tokens that are all x: x W + c, with W = W_V W_O and c = b_V W_O + b_O."""

    values: Tensor  # W_V, (D, H d), for tokens in rows
    values_bias: Tensor  # b_V
    output: Tensor  # W_O, (H d, D)
    output_bias: Tensor  # b_O

    @property
    def matrix(self) -> Tensor:
        """W, (D, D), computed in float64."""
        return (self.values.double() @ self.output.double()).to(self.output.dtype)

    def added(self, tokens: Tensor) -> Tensor:
        """Return x W + b_V W_O of tokens x (..., D)."""
        made = tokens @ self.values.to(tokens) + self.values_bias.to(tokens)
        return made @ self.output.to(tokens)


def product_of(block: Block, layout: str = "") -> Product | None:
    """Return the product of a block as its weights are now, or None where several layouts of a fused projection fit."""
    module: Any = block.module
    values, bias = _matrix(block, block.values, "W_V")
    output, output_bias = _matrix(block, module.out_proj if block.kind == TORCH else block.projection, "W_O")
    used, heads = len(output), heads_of(module)
    if block.kind == TORCH:
        layout = "alone"
    able = [one for one in LAYOUTS if fits(one, values.shape[1], used, heads)]
    if not able or (layout and layout not in able):
        got = f"a projection of values of {values.shape[1]} columns beside a W_O of {used} rows"
        raise _unknown(block, got, "values alone, or queries, keys and values in one")
    layout = layout or (able[0] if len(able) == 1 else "")
    if not layout:
        return None
    values, bias = (part(one, layout, used, heads) for one in (values, bias))
    if len(values) != output.shape[1]:
        raise _unknown(block, f"W_V W_O of shape {(len(values), output.shape[1])}", "a square one")
    return Product(values, bias, output, output_bias)


def _matrix(block: Block, projection: nn.Module | None, name: str) -> tuple[Tensor, Tensor]:
    try:
        if name == "W_V" and isinstance(block.module, nn.MultiheadAttention):
            weight, bias = weight_of(block.module)
        elif projection is None:
            raise UnknownError("no known module")
        else:
            weight, bias = weight_of(projection)
    except UnknownError as error:
        raise _unknown(block, f"no known {name} ({error})", "one matrix of floating-point numbers") from error
    return weight, weight.new_zeros(weight.shape[1]) if bias is None else bias


def _unknown(block: Block, got: str, expected: str) -> InputError:
    return InputError(
        f"model: got {got} in {block.name} ({type(block.module).__name__}), expected {expected}; leave this block out "
        "with adapter=, or take a cure without W_V W_O"
    )
