"""Cures of over-smoothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlflow._looks import assure
from nlflow.attention.injection.blocks import INTERFACE, SUMS, TORCH, Adapter, Block, heads_of, later, width
from nlflow.attention.injection.forward import TEMPERATURE, TERMS
from nlflow.attention.injection.visible import Present, visible
from nlflow.attention.injection.weights import Layout, Product, product_of
from nlflow.attention.terms.averages import causal_mask, uniform_average
from nlflow.attention.terms.neutreno import removed_similarity, scaled_features
from nlflow.attention.threads import OfThread, held, tracing
from nlflow.errors import InputError, check_choice, check_number


@dataclass(frozen=True)
class Cure:
    """One way to change a trained model against over-smoothing, without training.

    Attributes
    ----------
    name : str
    changes : str
        What it changes, as a formula.
    parameter : str
        Symbol of its number.
    neutral : float
        At which the cure does nothing.
    low, high : float
        Range of the number.
    values : tuple of float
        What `nlflow.attention.sweep` tries by default.
    source : str
    later : bool
        Whether it leaves the first layer of a stack alone.
    """

    name: str
    changes: str
    parameter: str
    neutral: float
    low: float
    high: float
    values: tuple[float, ...]
    source: str
    later: bool = False

    def arguments(self, strengths: Sequence[float]) -> dict[str, Any]:
        """What `attach` takes for this cure."""
        if self.name in TERMS_OF_V0:
            return {"fidelity": list(strengths), "semi_implicit": self.name == TERMS_OF_V0[0]}
        return {"fidelity": 0.0, "cures": {self.name: list(strengths)}}


_OFF = 1e-6  # of the eigenvalues' size: eigenvectors that are nearly dependent lose more
_MEANS = ("similarity-removal", "centring", "feat-scale", "attn-scale")  # cures that need a mean over tokens
_PRODUCTS = {"centring", "attn-scale", "sharpening"}  # those that need W_V W_O
TERMS_OF_V0 = ("semi-implicit", "explicit")
_INFINITE = float("inf")
CURES = {
    one.name: one
    for one in (
        Cure("semi-implicit", "P v -> (P v + λ̃ v0) / (1 + λ̃)", "λ̃", 0, 0, _INFINITE, (0.1, 0.4),
             "Nguyen et al., NeurIPS 2023, arXiv 2312.00751; the end point of the step in the place of v", True),
        Cure("explicit", "P v -> P v + λ̃ (v0 - v)", "λ̃", 0, 0, _INFINITE, (0.1, 0.4),
             "Nguyen et al., NeurIPS 2023, arXiv 2312.00751, eq. 28", True),
        Cure("similarity-removal", "x -> x - τ mean(x) before a layer", "τ", 0, 0, 1, (0.1, 0.5),
             "Yu et al., arXiv 2312.06182", True),
        Cure("centring", "P v -> P v - γ mean(v)", "γ", 0, 0, 1, (0.2, 1.0),
             "Ali, Galanti, Wolf, arXiv 2306.01610"),
        Cure("feat-scale", "y -> y + t (y - mean(y)), y what attention adds", "t", 0, -1, _INFINITE, (0.2, 0.5),
             "Wang et al., ICLR 2022, arXiv 2203.05962, with one t for all features and s = 0"),
        Cure("attn-scale", "P v -> P v + ω (P v - mean(v))", "ω", 0, -1, _INFINITE, (0.2, 0.5),
             "Wang et al., ICLR 2022, arXiv 2203.05962, with one ω for all heads"),
        Cure("temperature", "logits -> logits / T", "T", 1, 0.01, 100, (0.8, 1.25),
             "softmax of other sharpness; Guo et al., ICML 2017, arXiv 1706.04599, has T of outputs"),
        Cure("layer-scale", "y -> γ y, y what attention adds", "γ", 1, 0, _INFINITE, (0.8, 1.2),
             "Touvron et al., ICCV 2021, arXiv 2103.17239, with one γ for all features"),
        Cure("sharpening", "eigenvalues ω of W_V W_O with Re ω > 0 get the real part (1 - 2 s) Re ω", "s", 0, 0, 1,
             (0.25, 1.0), "Dovonon et al., TMLR 2025, arXiv 2401.04301: with s = 1 no real part is positive"),
    )
}  # fmt: skip
"""All cures, by their names."""


def checked(cures: Mapping[str, float | Sequence[float]] | None, count: int) -> dict[str, list[float]]:
    result = {}
    names = tuple(name for name in CURES if name not in TERMS_OF_V0)
    if cures is not None and not isinstance(cures, Mapping):
        raise InputError(f"cures: got {type(cures).__name__}, expected a mapping such as {{'temperature': 0.8}}")
    for name, given in (cures or {}).items():
        if name in TERMS_OF_V0:
            raise InputError(
                f"cures: got {name!r}, which attach has as arguments of its own, expected other cures; write "
                f"attach(model, fidelity=0.4, semi_implicit={name == TERMS_OF_V0[0]})"
            )
        cure = CURES[check_choice("cures", name, names)]
        own: Any = given  # or an array, of which one without axes is a number
        several = hasattr(own, "__len__") and not isinstance(own, str) and getattr(own, "ndim", 1) > 0
        numbers: list[Any] = list(own) if several else [own] * count
        if len(numbers) != count:
            raise InputError(
                f"cures[{name!r}]: got {len(numbers)} values, expected {count}, one for each block, or one"
            )
        found = [in_range(cure, f"cures[{name!r}]", number) for number in numbers]
        if any(number != cure.neutral for number in found):
            result[name] = found
    return result


def in_range(cure: Cure, name: str, number: Any) -> float:
    found = check_number(name, number)
    if not cure.low <= found <= cure.high:
        to = f"to {cure.high:g}" if cure.high < _INFINITE else "up"
        raise InputError(
            f"{name}: got {found:g}, expected {cure.parameter} from {cure.low:g} {to} for {cure.name} "
            f"({cure.changes}); "
            f"{cure.neutral:g} is the model as it is"
        )
    return found


def give_cures(
    model: nn.Module, found: list[Block], cures: Mapping[str, list[float]], handles: list[Any], adapter: Any = None
) -> None:
    if not cures:
        return
    if means := [name for name in cures if name in _MEANS]:
        adapters = (adapter,) if isinstance(adapter, Adapter) else tuple(adapter or ())
        _check_order(model, found, means[0], told=any(one.causal is not None for one in adapters))
    present = Present(needed=bool(means))
    handles += present.hooks(model)
    layouts = _layouts(found, handles) if cures.keys() & _PRODUCTS else {}
    for number, (block, able) in enumerate(zip(found, later(found), strict=True)):
        own = {name: values[number] for name, values in cures.items() if values[number] != CURES[name].neutral}
        if "similarity-removal" in own and block.layer is block.module:
            raise InputError(
                f"cures['similarity-removal']: got {block.name}, before whose layer no module runs, expected a module "
                "for each layer; take centring, which acts on what is averaged"
            )
        if "similarity-removal" in own and able:
            removal = _Removal(block, own["similarity-removal"], present)
            handles += removal.hooks()
        if "temperature" in own:
            handles += _temperature(block, own["temperature"])
        if own.keys() & {"centring", "feat-scale", "attn-scale", "layer-scale", "sharpening"}:
            handles += _Branch(block, own, present, layouts.get(block.name)).hooks()


def _layouts(found: list[Block], handles: list[Any]) -> dict[str, Layout]:
    """Return what finds the layout of values of each block, one for each kind of module; `handles` gets its hooks."""
    kinds: dict[Any, Layout] = {}
    result: dict[str, Layout] = {}
    for block in found:
        if block.values is None or block.projection is None:
            continue
        widths = width(block.values), width(block.projection), heads_of(block.module)
        own = result[block.name] = kinds.setdefault((type(block.module), type(block.values), widths), Layout())
        terms = getattr(block.module, TERMS, None)
        # Elsewhere than in modules that sum by themselves, terms are in the averages when they come to W_O.
        if block.kind == SUMS or terms is None or not (terms.active or terms.options.attn_scale):
            handles += own.hooks(block)
    return result


def _check_order(model: nn.Module, found: list[Block], name: str, *, told: bool) -> None:
    """Refuse means over tokens where nothing says whether a token sees the later ones: they would tell the future."""
    for block in found:
        module: Any = block.module
        silent = not hasattr(module, "is_causal") and not hasattr(module, "causal")
        if block.kind == SUMS and silent and not told and hasattr(model, "config"):
            raise InputError(
                f"cures[{name!r}]: got {block.name} ({type(module).__name__}), which sums by itself and does not say "
                "whether a token sees the later ones, over which the mean would be; expected adapter=Adapter("
                f"{type(module).__name__!r}, causal=True) for a decoder, and causal=False for an encoder"
            )


def held_bytes(name: str, found: list[Block], arguments: Mapping[str, Any]) -> tuple[int, int]:
    numbers: Any = arguments.get("cures", {}).get(name) or arguments["fidelity"]
    acting = [block for block, number in zip(found, numbers, strict=True) if number != CURES[name].neutral]
    widths = [width(block.projection) or int(getattr(block.module, "embed_dim", 0)) for block in acting]
    size = next((one.element_size() for one in acting[0].module.parameters()), 4) if acting else 4
    if name in TERMS_OF_V0:  # v0 is kept until the last layer
        return 0, size * max(widths, default=0)
    squares = sum(one**2 for one in widths)
    return size * squares * (name == "sharpening"), 0


def _check_past(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not block.causal:
        return
    number = getattr(block.module, "layer_idx", None)
    for one in (*args, *kwargs.values()):
        if not hasattr(one, "get_seq_length"):
            continue
        length = one.get_seq_length() if number is None else one.get_seq_length(number)
        if int(length) > 0:
            raise InputError(
                f"cures: got tokens after {int(length)} in a cache in {block.name}, expected the whole sequence, since "
                "the mean over its tokens is not in the cache; decode with use_cache=False"
            )


def _tokens(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the tokens of a call as they were given, and as (B, N, D)."""
    given = (kwargs.get("hidden_states"), kwargs.get("query"), *args, *kwargs.values())
    found = next((one for one in given if isinstance(one, Tensor) and one.is_floating_point() and one.ndim == 3), None)
    if found is None:
        raise InputError(
            f"cures: got a call of {block.name} without tokens (batch, tokens, features), expected such; leave this "
            "module out with adapter="
        )
    return found, found.transpose(0, 1) if block.tokens_first else found


# ---- before a layer


@dataclass(eq=False)
class _Removal:
    """A hook before a layer, which takes a share of the mean of its tokens away."""

    block: Block
    strength: float
    present: Present
    used: OfThread = field(default_factory=OfThread)  # which tokens each was taken to see

    def hooks(self) -> list[Any]:
        block = self.block
        return [
            block.layer.register_forward_pre_hook(self, with_kwargs=True),
            block.module.register_forward_pre_hook(self.check, with_kwargs=True),
        ]

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a mean over other tokens than attention itself sees."""
        used = self.used.take()
        if torch.compiler.is_compiling() or tracing() or not used:
            return
        (shape, before), (_, tokens) = used, _tokens(self.block, args, kwargs)
        if tokens.shape[:2] != shape:
            return  # windows
        own = visible(self.block, self.present, module, args, kwargs, tokens)
        if own is before:
            return
        every = tokens.new_ones(1, 1, 1, dtype=torch.bool)
        if self.block.causal:
            every = causal_mask(tokens.shape[1], tokens.shape[1], tokens.device)
        one, other = (every if each is None else each for each in (before, own))
        assure(((one == other) | ~one.any(-1, keepdim=True)).all(), self.refuse)  # padding may see nothing

    def refuse(self) -> None:
        raise InputError(
            f"cures['similarity-removal']: got a mask in {self.block.name} that is not seen in the call of its "
            "layer, expected means over the tokens that attention sees; expected adapter=Adapter("
            "'MultiheadAttention', causal=True) for a decoder; take feat-scale or centring for other masks"
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, tokens = _tokens(self.block, args, kwargs)
        _check_past(self.block, args, kwargs)
        seen = visible(self.block, self.present, module, args, kwargs, tokens)
        self.used.set((tokens.shape[:2], seen))
        changed = removed_similarity(tokens, self.strength, seen, causal=self.block.causal)
        changed = changed.transpose(0, 1) if self.block.tokens_first else changed
        return (
            tuple(changed if one is given else one for one in args),
            {name: changed if one is given else one for name, one in kwargs.items()},
        )


# ---- logits


def _temperature(block: Block, temperature: float) -> list[Any]:
    if block.kind == INTERFACE:
        block.module.__dict__[TEMPERATURE] = temperature  # `forward.attention` reads it
        return [_Forget(block.module, TEMPERATURE)]
    cooler = (_InTorch if block.kind == TORCH else _Softmaxes)(block.module, temperature)
    return [
        block.module.register_forward_pre_hook(cooler.begin),
        block.module.register_forward_hook(cooler.end, always_call=True),
    ]


@dataclass
class _Forget:
    module: nn.Module
    name: str

    def remove(self) -> None:
        self.module.__dict__.pop(self.name, None)


class _InTorch:
    """Queries over T in a `torch.nn.MultiheadAttention`: its weights of queries are others while it runs."""

    def __init__(self, module: Any, temperature: float) -> None:
        self.module, self.temperature, self.open = module, temperature, OfThread()

    def begin(self, *_: Any) -> None:
        owner = self.module
        contexts = []
        for name in ("in_proj_weight", "q_proj_weight", "in_proj_bias"):
            if (weight := owner._parameters.get(name)) is not None:
                contexts.append(self._changed(name, weight))
        self.open.set(contexts)

    def _changed(self, name: str, weight: Tensor) -> Any:
        def put(value: Any) -> None:
            self.module._parameters[name] = value

        def change(before: Any) -> Tensor:
            with torch.enable_grad():  # another thread that shares this may need the derivative
                queries, rest = before[: self.module.embed_dim], before[self.module.embed_dim :]
                return torch.cat([queries / self.temperature, rest])

        context = held((id(self.module), name), lambda: self.module._parameters[name], put, change)
        context.__enter__()
        return context

    def end(self, *_: Any) -> None:
        for context in self.open.take() or ():
            context.__exit__(None, None, None)


class _Softmaxes:
    """Logits over T in a module that sums by itself: of its calls of softmax and of torch's fused attention."""

    def __init__(self, module: nn.Module, temperature: float) -> None:
        self.temperature, self.open = temperature, OfThread()

    def begin(self, *_: Any) -> None:
        mode = _Cooler(self.temperature)
        mode.__enter__()  # type: ignore[no-untyped-call]  # of torch
        self.open.set(mode)

    def end(self, *_: Any) -> None:
        if (mode := self.open.take()) is not None:
            mode.__exit__(None, None, None)


class _Cooler(TorchFunctionMode):
    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("softmax", "scaled_dot_product_attention") and args and isinstance(args[0], Tensor):
            args = (args[0] / self.temperature, *args[1:])
        return func(*args, **(kwargs or {}))


# ---- what attention adds


class _Branch:
    """What attention adds in one block, changed.

    Most cures change y, the output of the projection. With W = W_V W_O, c = b_V W_O + b_O and the mean m of the tokens
    that came in, u = m W + c is what attention adds where it is uniform. So no cure needs the heads.
    """

    def __init__(self, block: Block, own: Mapping[str, float], present: Present, layout: Layout | None = None) -> None:
        self.block, self.own, self.present, self.layout = block, own, present, layout
        self.mean, self.visible = OfThread(), OfThread()
        self.place = block.module if block.kind == TORCH or block.projection is None else block.projection
        self.turn: tuple[Any, Tensor] | None = None  # of the weights of this state
        if own.keys() & _PRODUCTS and (product := product_of(block)) is not None:
            self._turn(product)  # what cannot be turned is refused now

    def _known(self) -> Product:
        """Return W_V W_O as it is now; that of a fused projection is known after a call alone."""
        found = product_of(self.block, "" if self.layout is None else self.layout.name)
        if found is None:
            raise InputError(
                f"model: got {self.block.name} ({type(self.block.module).__name__}), in whose projection of "
                "queries, keys and values together it is not known which columns are values; expected a first "
                "call in evaluation mode that shows it; call model.eval(), or leave this block out with adapter="
            )
        return found

    def _turn(self, product: Product) -> Tensor | None:
        """Return the matrix of a sharpening, made anew where the weights are others; it has no derivative."""
        if "sharpening" not in self.own:
            return None
        weights = (product.values, product.output)
        learning = torch.is_grad_enabled() and any(one.requires_grad for one in weights)
        if learning and self.block.module.training:
            raise InputError(
                f"cures['sharpening']: got a training of {self.block.name}, whose W_V W_O learns, expected weights "
                "that stay; call model.eval(), or requires_grad_(False) for them"
            )
        if self.turn is not None and torch.compiler.is_compiling():  # a graph compares no memory
            return self.turn[1]
        state = [(one.data_ptr(), one._version, one.dtype) for one in weights]
        if self.turn is None or self.turn[0] != state:
            with torch.no_grad():
                self.turn = state, sharpened(product.matrix, self.own["sharpening"])
        return self.turn[1]

    def hooks(self) -> list[Any]:
        return [
            self.block.module.register_forward_pre_hook(self.begin, with_kwargs=True),
            self.place.register_forward_hook(self.change),
        ]

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tracing() or not self.own.keys() & {"centring", "attn-scale", "feat-scale"}:
            return
        _check_past(self.block, args, kwargs)
        _, tokens = _tokens(self.block, args, kwargs)
        self.visible.set(visible(self.block, self.present, module, args, kwargs, tokens))
        self.mean.set(self._mean(tokens))

    def _mean(self, tokens: Tensor) -> Tensor:
        """Return the mean of the tokens (B, N, D) that each of them may see, (B, N or 1, D)."""
        return uniform_average(tokens, tokens.shape[1], self.visible.get(), self.block.causal)

    def change(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if tracing():
            return output
        if isinstance(output, tuple):
            first = self.block.tokens_first
            made = self._changed(output[0].transpose(0, 1)).transpose(0, 1) if first else self._changed(output[0])
            return (made, *output[1:])
        return self._changed(output)

    def _changed(self, made: Tensor) -> Tensor:
        mean = self.mean.take()
        if self.own.keys() & _PRODUCTS:
            product = self._known()
            bias, turn = product.output_bias.to(made), self._turn(product)
            if turn is not None:
                made = (made - bias) @ turn.to(made) + bias
            omega, gamma = self.own.get("attn-scale", 0.0), self.own.get("centring", 0.0)
            if mean is not None and (omega or gamma):
                uniform = product.added(mean.to(made))
                if turn is not None:
                    uniform = uniform @ turn.to(made)
                made = torch.add(made, made - bias - uniform, alpha=omega) if omega else made
                made = torch.sub(made, uniform, alpha=gamma) if gamma else made
        if high := self.own.get("feat-scale", 0.0):
            made = scaled_features(made, self._mean(made), 0.0, high)
        return torch.mul(made, self.own["layer-scale"]) if "layer-scale" in self.own else made


def sharpened(matrix: Tensor, share: float) -> Tensor:
    """Return K (D, D) such that W K has W's eigenvectors, and the eigenvalues ω - 2 s Re ω for those with Re ω > 0.

    O(D³), in float64; `InputError` for a matrix that has no basis of eigenvectors, to rounding.
    """
    values, vectors = torch.linalg.eig(matrix.double())
    small = values.abs() <= torch.finfo(torch.float64).eps * values.abs().max() * len(values)
    wanted = torch.complex(torch.where(values.real > 0, (1 - 2 * share) * values.real, values.real), values.imag)
    ratio = torch.where(small, torch.ones_like(values), wanted / values)
    inverse, failed = torch.linalg.inv_ex(vectors)
    turn = ((vectors * ratio) @ inverse).real
    # Of such a matrix the eigenvectors are not sound, and W K does not have the spectrum that it should have.
    off = torch.linalg.norm(matrix.double() @ turn @ vectors.real - (vectors * wanted).real)
    if int(failed) or not float(off) <= _OFF * float(torch.linalg.norm(values)):
        raise InputError(
            "cures['sharpening']: got a W_V W_O without a basis of eigenvectors, expected one; leave this layer out"
        )
    result: Tensor = turn.to(matrix.dtype)
    return result
