"""What attention adds to its layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlflow.attention.injection.blocks import Block, crosses, kind_of
from nlflow.attention.threads import tracing

_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_SAME = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double", "clone", "contiguous"})
_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"})  # numbers stay in order
_NORMS = frozenset({"layer_norm", "rms_norm"})
_BENDS = re.compile(r"(relu6?|gelu|silu|elu|celu|selu|mish|softplus|hardswish|leaky_relu)_?")
_MOST = 64  # summands; a sum of more is one of its own

# What a tensor was made from. Each but the first goes with the number of a block.
_INPUT, _GIVEN, _LATER, _MIXED, _BENT = "input", "given", "later", "mixed", "bent"
Marks = frozenset[tuple[str, int]]
_OF_INPUT: Marks = frozenset({(_INPUT, -1)})


ATTENTION, CROSS, MLP, NORM = "attention", "cross-attention", "mlp", "norm"
"""What the steps of a layer are."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a layer on its hidden state: it adds a tensor, or norms the state."""

    kind: str  # ATTENTION of this block, CROSS (over other tokens, or another block's), NORM, MLP (all else)
    tensor: Tensor  # (B, N, D): what is added, or the normed state
    beside: bool = False  # computed beside attention, as in GPT-J, so that the order of both is free


@dataclass(eq=False)
class Seen:
    """What one run shows of a block."""

    block: Block
    taken: Any = None
    before: Tensor | None = None
    between: Tensor | None = None  # the state with what attention adds, normed where the layer norms that sum
    after: Tensor | None = None
    added: Tensor | None = None  # by attention
    summed: Tensor | None = None  # the sum of which `after` is the norm alone
    reason: str = ""  # why these are not known
    attended: bool = False
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    pieces: list[Any] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    norms: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)
    earlier: list[Seen] = field(default_factory=list)
    number: int = 1  # of the call
    turned: bool = False  # whether the layer takes states (N, B, D)

    def begin(self) -> None:
        if self.attended:
            earlier, number = [*self.earlier, self._alone()], self.number + 1
            vars(self).update(vars(Seen(self.block)), earlier=earlier, number=number)

    def turn(self) -> None:
        """Turn (N, B, D)."""
        self.turned = True
        for name in ("before", "between", "after", "added", "summed"):
            setattr(self, name, _turned(getattr(self, name)))
        self.steps = [Step(one.kind, one.tensor.transpose(0, 1), one.beside) for one in self.steps]
        self.norms = [(module, _turned(given), _turned(made)) for module, given, made in self.norms]

    def _alone(self) -> Seen:
        kept = Seen(self.block)
        vars(kept).update(vars(self), earlier=[])
        return kept

    @property
    def name(self) -> str:
        return self.block.name + (f" (call {self.number})" if self.number > 1 else "")


def own(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for this thread alone, unwatched, and not where a layer runs for its values."""
    thread = get_ident()

    def acting(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread or tracing():
            return None
        with torch._C.DisableTorchFunction():
            return hook(*args, **kwargs)

    return acting


@contextmanager
def watching(found: Sequence[Seen], *, calls: bool = False) -> Iterator[None]:
    """Watch states, sums and, with `calls`, steps and norms in this thread."""
    layers: dict[int, list[Seen]] = {}
    for one in found:
        layers.setdefault(id(one.block.layer), []).append(one)
    watch = _Watch()
    with ExitStack() as stack:
        for several in layers.values():
            for handle in watch.hooks(several, calls):
                stack.callback(handle.remove)
        stack.enter_context(watch)
        yield


def state_of(values: Sequence[Any]) -> Tensor | None:
    """The first hidden state."""
    return next((one for one in values if isinstance(one, Tensor) and one.ndim == 3 and one.is_floating_point()), None)


def _turned(one: Any) -> Any:
    return one.transpose(0, 1) if isinstance(one, Tensor) and one.ndim == 3 else one


def _tensors(values: Any) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


class _Watch(TorchFunctionMode):
    """Follows the tensors of the layers that run, the innermost last."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[_Sums] = []

    def hooks(self, several: list[Seen], calls: bool) -> list[Any]:
        layer = several[0].block.layer
        handles = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for one in several:
                one.begin()
                if calls:
                    one.args, one.kwargs = args, kwargs
            given = state_of((*args, kwargs.get("hidden_states")))
            sums = _Sums(layer, given, calls)
            for one in several:
                one.before = sums.root.tensor if given is not None else None
            self.running.append(sums)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            sums = self.running.pop()
            after = state_of(output if isinstance(output, tuple | list) else (output,))
            copied = None if after is None else after.clone()
            for number, one in enumerate(several):
                one.after = copied
                if one.attended:
                    sums.tell(one, number, after)
                    if one.block.tokens_first and sums.tokens_first(number):
                        one.turn()

        def attended(one: Seen | None, number: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if one is not None:
                    one.attended = True
                for sums in [sums for sums in self.running if sums.layer is layer][-1:]:
                    sums.attended(number, output if isinstance(output, tuple | list) else (output,))

            return hook

        def begun(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                for sums in self.running:
                    sums.begun[number if sums.layer is layer else -1] = sums.count
                    if sums.layer is layer:
                        sums.entered[number] = state_of((*args, kwargs.get("query")))

            return hook

        def normed(module: nn.Module, args: Any, output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                for sums in self.running:
                    sums.norm(args[0], output)
                    if sums.calls:
                        sums.norms.append((module, args[0], output))

        if layer is not several[0].block.module:
            handles.append(layer.register_forward_pre_hook(own(enter), with_kwargs=True))
            handles.append(layer.register_forward_hook(own(leave)))
            for module in layer.modules():
                if "norm" in type(module).__name__.lower():
                    handles.append(module.register_forward_hook(own(normed)))
        attending: list[tuple[Seen | None, nn.Module]] = [(one, one.block.module) for one in several]
        if calls and layer is not several[0].block.module:
            known = {id(module) for _, module in attending}
            attending += [
                (None, module) for name, module in layer.named_modules()
                if id(module) not in known and kind_of(module) and crosses(name, module)
            ]  # fmt: skip
        for number, (seen, module) in enumerate(attending):
            handles.append(module.register_forward_pre_hook(own(begun(number)), with_kwargs=True))
            handles.append(module.register_forward_hook(own(attended(seen, number))))
        return handles

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.running or tracing():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        known = [(sums, sums.before(name, args, kwargs)) for sums in self.running]
        output = func(*args, **kwargs)
        for sums, kept in known:
            sums.ran(name, args, kwargs, output, kept)
        return output


@dataclass(eq=False)
class _Summand:
    """A tensor that is added to others; of a state of the layer `normed` is the sum that it is the norm of."""

    tensor: Tensor
    marks: Marks
    normed: tuple[_Summand, ...] | None = None
    number: int = 0


@dataclass(eq=False)
class _Known:
    """What is known of a tensor: the sum that it is, if it is one, and what it was made from."""

    marks: Marks
    sum: tuple[_Summand, ...] | None = None
    normed: tuple[_Summand, ...] | None = None


class _OfTensors:
    """What is known of the tensors of one call, by themselves; torch's own kind of this is slow.

    What was known of a tensor that is gone stays until the call ends, or its number is another's.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], _Known]] = {}

    def get(self, one: Tensor) -> _Known | None:
        found = self._known.get(id(one))
        return found[1] if found is not None and found[0]() is one else None  # the number may be another's by now

    def __setitem__(self, one: Tensor, known: _Known) -> None:
        self._known[id(one)] = ref(one), known


class _Sums:
    """The sums that one call of a layer computes of its input `given`.

    Each tensor that comes of the input is known by the sum that it is, x + a + m, and each summand by what it was made
    from. Attention adds the summands that are made from its output, but not from a sum that contains this output.
    """

    def __init__(self, layer: nn.Module, given: Tensor | None, calls: bool) -> None:
        self.layer, self.calls = layer, calls
        self.known = _OfTensors()
        self.root = _Summand(torch.empty(0) if given is None else given.clone(), _OF_INPUT)
        self.count = 0  # summands so far
        self.begun: dict[int, int] = {}  # of each block: summands before its attention ran
        self.entered: dict[int, Tensor | None] = {}  # and what that was given
        self.norms: list[tuple[nn.Module, Tensor, Tensor]] = []
        self.states: dict[int, tuple[set[_Summand], Tensor]] = {}  # of each block: the state that has its branch
        self.broken = ""
        if given is not None:
            self.known[given] = _Known(_OF_INPUT, (self.root,))

    # ---- what the operations of torch do

    def before(self, name: str, args: Any, kwargs: Any) -> Any:
        """Save what an operation will overwrite; return the tensor that it writes into, and a copy of a state."""
        inside = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or (
            name.startswith("__i") and name not in ("__index__", "__invert__", "__int__", "__iter__")
        )  # fmt: skip
        target = args[0] if inside and args and isinstance(args[0], Tensor) else kwargs.get("out")
        if not isinstance(target, Tensor):
            return None
        if name in _SUMS and any(self.known.get(one) is not None for one in _tensors(args)):
            self._summands(target)  # which is overwritten by the sum
        found = self.known.get(target)
        if found is None or (found.sum is None and found.normed is None):
            return None
        copied = target.clone()
        for one in found.sum or ():
            if one.tensor is target:
                one.tensor = copied
        return target, copied

    def ran(self, name: str, args: Any, kwargs: Any, output: Any, kept: Any) -> None:
        given = list(_tensors((*args, *kwargs.values())))
        known = [(other, found) for other in given if (found := self.known.get(other)) is not None]
        if not known:
            return
        outputs = [one for one in _tensors((output,)) if one.is_floating_point()]
        if name == "__setitem__":
            outputs = [args[0]]
        if not outputs:
            return
        if name in _SUMS and self._added(args, kwargs, outputs[0]):
            return
        one = known[0][0]
        marks = frozenset().union(*(self._used(found) for _, found in known))
        if name in _NORMS and outputs[0] is not one:
            self.norm(one, outputs[0])
            return
        alone = all(other is one or other.numel() == 1 for other in given)
        if alone and len(outputs) == 1 and self._same(name, one, known[0][1], outputs[0], kept):
            self.known[outputs[0]] = known[0][1]
            return
        if _BENDS.fullmatch(name):
            marks |= {(_BENT, block) for what, block in marks if what == _GIVEN}
        for made in outputs:
            self.known[made] = _Known(marks)

    def _same(self, name: str, one: Tensor, found: _Known, made: Tensor, kept: Any) -> bool:
        """Return whether a state or a sum passed an operation as it is, as idle dropout, or a cast."""
        if made.numel() != one.numel() or not (
            found.normed or self._stream(found.sum or ()) or len(found.sum or ()) > 1
        ):
            return False
        if made is one and kept is None:
            return True
        if name in _SAME or name in _RESHAPES:
            return True
        return made.dtype == one.dtype and equal(made, kept[1] if made is one and kept else one)

    def _added(self, args: Any, kwargs: Any, made: Tensor) -> bool:
        """Learn what an addition returned; False where it is no sum of two tensors."""
        if len(args) != 2 or not all(isinstance(one, Tensor) for one in args) or kwargs.get("alpha", 1) != 1:
            return False
        parts = [self._summands(one) for one in args]
        summands = (*parts[0], *parts[1])
        streams = self._stream(summands)
        if len(summands) > _MOST or any(one.tensor.numel() != made.numel() for one in streams):
            return False
        marks = frozenset().union(*(one.marks for one in summands))
        self.known[made] = _Known(marks, summands)
        if streams == [self.root]:
            for block in {block for what, block in marks if what == _GIVEN}:
                others = [one for one in summands if one is not self.root]
                if all(_gives(one.marks, block) for one in others):
                    self.states[block] = set(others), made.clone()
        return True

    def _summands(self, one: Tensor) -> tuple[_Summand, ...]:
        """Return the sum that a tensor is, which may be itself alone."""
        found = self.known.get(one)
        if found is None:
            found = self.known[one] = _Known(frozenset())
        if found.sum is None:
            self.count += 1
            found.sum = (_Summand(one, found.marks, found.normed, self.count),)
        return found.sum

    def _stream(self, summands: Sequence[_Summand]) -> list[_Summand]:
        """Return which summands are states of the layer: its input, and norms of such."""
        return [one for one in summands if one is self.root or one.normed is not None]

    def _used(self, found: _Known) -> Marks:
        """Return what is made from a tensor that is used otherwise than in a sum."""
        marks = found.marks
        if found.sum is None:
            return marks
        streams = self._stream(found.sum)
        for block in {block for what, block in marks if what == _GIVEN}:
            given = [one for one in found.sum if _gives(one.marks, block)]
            others = [one for one in found.sum if (_GIVEN, block) not in one.marks and one.marks >= _OF_INPUT]
            if given and streams:
                marks |= {(_LATER, block)}
            elif given and others:
                marks |= {(_MIXED, block)}
        return marks

    def norm(self, given: Tensor, made: Tensor) -> None:
        found = self.known.get(given)
        if found is None:
            return
        whole = found.sum
        if whole is None and found.normed is not None:
            whole = self._summands(given)
        told = self.known.get(made)
        if told is not None and whole is not None and told.normed is whole:
            return  # its function was seen, and now the module
        state = whole is not None and len(self._stream(whole)) == 1 and self._is_sum(given, whole)
        self.known[made] = _Known(self._used(found), normed=whole if state else None)

    def _is_sum(self, made: Tensor, summands: Sequence[_Summand]) -> bool:
        """Return whether a tensor is a sum, to the rounding of its additions."""
        if len(summands) == 1 and summands[0].tensor is made:
            return True
        parts = [_shaped(one.tensor.detach(), made) for one in summands]
        if torch.equal(
            sum(parts[1:], parts[0]).to(made.dtype), made
        ):  # as it nearly always is, without the cost of the rest
            return True
        unit = max(torch.finfo(one.dtype).eps for one in (made, *parts) if one.is_floating_point())
        total, size = (
            sum(of(one.double()) for one in parts) for of in (lambda part: part, torch.Tensor.abs)
        )  # fmt: skip
        if bool(((made.detach().double() - total).abs() > len(parts) * unit * size).any()):
            self.broken = "what it computes is not the sum of what was seen to be added"
            return False
        return True

    # ---- what this says of attention

    def tokens_first(self, block: int) -> bool:
        """Return whether states of this layer are (N, B, D), where its attention takes tokens so.

        It may turn them itself. Where there are as many tokens as sequences, shapes do not tell.
        """
        entered, state = self.entered.get(block), self.root.tensor
        if entered is None or entered.shape != state.shape:
            return False
        found = self.known.get(entered)
        return len(state) != state.shape[1] or (
            found is not None and bool(found.normed or self._stream(found.sum or ()))
        )

    def attended(self, block: int, outputs: Sequence[Any]) -> None:
        made = [one for one in _tensors(outputs) if one.is_floating_point()]
        found = self.known.get(made[0]) if made else None
        inner = [] if found is None else self._levels(self._of(found, made[0])) or []
        if not inner or not (found is not None and (found.normed or self._stream(found.sum or ()))):
            later = frozenset() if found is None else frozenset(mark for mark in found.marks if mark[0] == _LATER)
            for one in made:
                self.known[one] = _Known(_OF_INPUT | later | {(_GIVEN, block)})
            return
        # The module has the sum in it, and perhaps its norm (ALBERT).
        for other in (other for _, others in inner for other in others):
            if other.number > self.begun.get(block, 0):
                other.marks |= {(_GIVEN, block)}
        assert found is not None
        found.marks |= {(_LATER, block)} if found.normed else {(_GIVEN, block)}
        if found.sum and found.normed is None and len(inner) == 1:
            self.states[block] = set(inner[0][1]), made[0].clone()

    def _of(self, found: _Known, one: Tensor) -> tuple[_Summand, ...]:
        return found.sum or (_Summand(one, found.marks, found.normed),)

    def _levels(self, summands: tuple[_Summand, ...]) -> list[tuple[_Summand, list[_Summand]]] | None:
        """Return the states of a layer from its input on, each with what is added to it; None where there are none."""
        levels: list[tuple[_Summand, list[_Summand]]] = []
        while True:
            streams = self._stream(summands)
            if len(streams) != 1:
                return None
            base = streams[0]
            levels.insert(0, (base, [one for one in summands if one is not base]))
            if base is self.root:
                return levels
            summands = base.normed or ()

    def tell(self, one: Seen, block: int, after: Tensor | None) -> None:
        """Say what the attention of a block has added, or why that is not known."""
        found = None if after is None else self.known.get(after)
        if one.before is None or after is None:
            return  # the layer shows no states at all
        if after.shape != one.before.shape:
            one.reason = "it does not take one hidden state (B, N, D) and return another of the same shape"
            return
        levels = None if found is None else self._levels(self._of(found, after))
        one.reason = self._refused(levels, block, after)
        if one.reason or levels is None:
            return
        branch = [other for other in levels[0][1] if _gives(other.marks, block)]
        one.added = _total(branch, one.before)
        if self.calls:
            one.steps, one.norms = self._steps(levels, block, one.before), self.norms
        alone = len(branch) == len(levels[0][1])
        kept, state = self.states.get(block, (None, None))
        if len(levels) > 1 and alone:
            one.between = _shaped(levels[1][0].tensor, one.before).clone()
        elif len(levels) == 1 and state is not None and kept == set(branch):
            one.between = _shaped(state, one.before)
        else:
            one.between = one.before + one.added
            if len(levels) > 1:
                one.summed = one.before + _total(levels[0][1], one.before)

    def _steps(self, levels: Any, block: int, like: Tensor) -> list[Step]:
        """Return the steps of the layer in order. Summands of one kind that follow each other are one step."""
        steps: list[Step] = []
        for depth, (base, others) in enumerate(levels):
            if depth:
                steps.append(Step(NORM, _shaped(base.tensor, like).clone()))
            level: list[tuple[str, bool, list[_Summand]]] = []
            for one in sorted(others, key=lambda one: one.number):
                kind, beside = self._kind(one, block)
                if not level or level[-1][:2] != (kind, beside):
                    level.append((kind, beside, []))
                level[-1][2].append(one)
            steps += [Step(kind, _total(summands, like), beside) for kind, beside, summands in level]
        return steps

    def _kind(self, one: _Summand, block: int) -> tuple[str, bool]:
        """Return what a summand is, and whether it is computed beside the attention of a block."""
        if _gives(one.marks, block):
            return ATTENTION, False
        given = {other for what, other in one.marks if what == _GIVEN}
        beside = not any(other == block for _, other in one.marks) and one.number > self.begun.get(block, 0)
        return (CROSS if any(_gives(one.marks, other) for other in given) else MLP), beside

    def _refused(self, levels: Any, block: int, after: Tensor) -> str:
        """Return why the branch of a block is not known; empty where it is."""
        if levels is None:
            return self.broken or "what it returns is not seen to be its input and what is added to that"
        if len(levels) > 1 and not levels[0][1]:
            return "its input is normed before anything is added to it"
        if len(levels) == 1 and not self._is_sum(after, (self.root, *levels[0][1])):
            return self.broken
        giving = [sum(_gives(one.marks, block) for one in others) for _, others in levels]
        if not any(giving):
            return "what its attention gives is not seen in what is added to its input"
        if not giving[0] or any(giving[1:]) or (len(levels) > 2 and len(levels[0][1]) > giving[0]):
            return "what its attention gives is not added to its input alone"
        marks = frozenset().union(*(one.marks for one in levels[0][1] if _gives(one.marks, block)))
        if (_MIXED, block) in marks:
            return "what its attention gives passes a norm or a scale together with what does not come of it"
        if (_BENT, block) in marks:
            return "what its attention gives passes an activation before it is added"
        return ""


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether numbers are the same, NaN, which states may be at padding, among them."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool((one.isnan() & other.isnan() | (one == other)).all())


def _gives(marks: Marks, block: int) -> bool:
    """Return whether a summand comes of what a block's attention gave, before that was added."""
    return (_GIVEN, block) in marks and (_LATER, block) not in marks


def _shaped(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the shape of another that has as many numbers; one that is spread over it stays."""
    return tensor.reshape(like.shape) if tensor.numel() == like.numel() else tensor


def _total(summands: Sequence[_Summand], like: Tensor) -> Tensor:
    """Return the sum of summands, in the shape and type of a state."""
    return sum((_shaped(one.tensor, like) for one in summands), torch.zeros_like(like)).to(like.dtype)
