"""Terms of modules that sum by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlflow.attention.injection.blocks import heads_of
from nlflow.attention.injection.forward import Stack
from nlflow.attention.injection.places import fresh
from nlflow.attention.injection.weights import LAYOUTS, LayoutError, fits, part, weight_in_torch
from nlflow.attention.terms.neutreno import LayerTerms, neutreno
from nlflow.attention.threads import OfThread, aside, end_with_values, evaluating, tracing
from nlflow.errors import InputError

_OFF, _ROUNDINGS = 4e-3, 8  # relative difference up to which a constant has come out as it went in; units of rounding


class _Came(BaseException):  # no module between may catch it
    """What came to the output projection, which ends a run of the module."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


class Summed:
    """Hooks of a term between two projections of a module."""

    def __init__(
        self, module: nn.Module, values: nn.Module, projection: nn.Module, terms: LayerTerms, stack: Stack
    ) -> None:
        self.module, self.terms, self.stack = module, terms, stack
        self.values, self.projection, self.heads = values, projection, heads_of(module)
        self.layout: str | None = None
        self.constant, self.taken, self.call = OfThread(), OfThread(), OfThread()  # `constant`: while it is looked at

    def hooks(self) -> list[Any]:
        return [
            self.module.register_forward_pre_hook(self.begin, with_kwargs=True),
            self.values.register_forward_hook(self.take),
            self.projection.register_forward_pre_hook(self.give),
        ]

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.taken.set(None)
        self.stack.ran()
        if self.layout is None and not torch.compiler.is_compiling():
            self.call.set(fresh(args, kwargs))

    def take(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        if (constant := self.constant.get()) is not None:
            return output + constant
        if self.taken.get() is not None and not tracing():
            raise self.refused("two calls of the projection of values in one call of the module")
        self.taken.set(output)
        if output.ndim > 2:
            end_with_values(self.module, output.flatten(1, -2)[:, None])
        return output

    def give(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        averages = args[0]
        if self.constant.get() is not None:
            raise _Came(averages)
        taken = self.taken.take()
        if taken is None or tracing():
            return args
        if taken.ndim < 3 or taken.shape[:-1].numel() != averages.shape[:-1].numel() or len(taken) != len(averages):
            raise self.refused(f"values of shape {tuple(taken.shape)} and averages {tuple(averages.shape)}")
        if self.layout is None:
            self.layout = self.find_layout(taken, averages)
            self.call.set(None)
        new = part(taken, self.layout, averages.shape[-1], self.heads).flatten(1, -2)
        call = self.stack.of(None, self.terms.label)
        first = call.first_values(self.module, self.terms, new[:, None])
        if first is None:
            return args
        implicit = self.terms.options.semi_implicit
        new, first = new.view(averages.shape), first[:, 0].reshape(averages.shape)
        step = neutreno(averages, new, first, self.terms.fidelity, semi_implicit=implicit)
        return (step, *args[1:])

    def find_layout(self, taken: Tensor, averages: Tensor) -> str:
        with torch.no_grad(), evaluating(self.module):
            generator = torch.Generator().manual_seed(0)
            columns = torch.randn(taken.shape[-1], generator=generator).to(taken)
            size = float(taken.abs().max()) or 1.0
            off = max(_OFF, _ROUNDINGS * torch.finfo(taken.dtype).eps)
            still = self.run(torch.zeros_like(columns))
            for layout in LAYOUTS:
                if not fits(layout, taken.shape[-1], averages.shape[-1], self.heads):
                    continue
                own = part(columns, layout, averages.shape[-1], self.heads)
                mask = part(torch.arange(len(columns), device=taken.device), layout, averages.shape[-1], self.heads)
                added = torch.zeros_like(columns)
                added[mask] = size * own  # queries and keys stay
                moved = self.run(added)
                if bool(((moved - still - size * own).abs() <= off * size).all()):
                    return layout
        raise self.refused("averages whose columns are not those of the values")

    def run(self, constant: Tensor) -> Tensor:
        """Return the averages of a run with a constant added to the values."""
        self.constant.set(constant)
        try:
            args, kwargs = fresh(*self.call.get())
            with aside():
                output = self.module.forward(*args, **kwargs)
        except _Came as came:
            return came.tokens
        finally:
            self.constant.set(None)
        return output[0] if isinstance(output, tuple | list) else output  # type: ignore[no-any-return]

    def refused(self, got: str) -> LayoutError:
        return LayoutError(
            f"model: got {got} in {self.terms.label} ({type(self.module).__name__}), which sums by itself; expected "
            "averages of one row for each token between the projections of values and output; leave it out with "
            "adapter=, or give it fidelity 0"
        )


class InTorch:
    """Hooks of a term in torch's ``MultiheadAttention``, which passes the output projection on its own."""

    def __init__(self, module: nn.MultiheadAttention, terms: LayerTerms, stack: Stack) -> None:
        self.module, self.terms, self.stack = module, terms, stack

    def hooks(self) -> list[Any]:
        return [
            self.module.register_forward_pre_hook(self.show, with_kwargs=True),
            self.module.register_forward_hook(self.add, with_kwargs=True),
        ]

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        query, key, value = (
            args[place] if len(args) > place else kwargs[name] for place, name in enumerate(("query", "key", "value"))
        )
        if query is not key and query is not value:
            raise InputError(
                f"model: got a call of {self.terms.label} (MultiheadAttention) with queries of one input and keys of "
                "another; expected self-attention; leave this module out with adapter="
            )
        weight, bias = weight_in_torch(self.module)
        made = functional.linear(value, weight, bias)
        made = made if made.ndim == 3 else made[None] if self.module.batch_first else made[:, None]
        return made if self.module.batch_first else made.transpose(0, 1)

    def show(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tracing():
            end_with_values(self.module, self.values(args, kwargs)[:, None])

    def add(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        new = self.values(args, kwargs)
        call = self.stack.of(None, self.terms.label)
        first = call.first_values(self.module, self.terms, new[:, None])
        if first is None:
            return output
        average, implicit = output[0], self.terms.options.semi_implicit
        made = [self.module.out_proj(one) for one in (new, first[:, 0])]
        made = made if self.module.batch_first else [one.transpose(0, 1) for one in made]
        own, begun = (one.reshape(average.shape) for one in made)
        return (neutreno(average, own, begun, self.terms.fidelity, semi_implicit=implicit), *output[1:])
