"""Appendix G.4: what the term costs in parameters, operations, memory and time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nlflow.plotting import new_figure
from nlflow.plotting.base import PALETTE, finish
from validation.harness import PAPER, Check, Claim, Context, Outcome
from validation.networks import libraries, on_one_thread, random_model

FIDELITY = 0.6
BATCH = 8
MATRIX = 3.0
"""Times the stock forward pass that the one with a matrix fidelity may take; it took 15 with covariances formed."""
LENGTH = 512
DECODER = f"forward, GPT-2 with {LENGTH} words"
SLACK = 1.25
"""Of the time: a machine that does other things as well measures ratios to within some 10 %, a real loss is larger."""


class Counter:
    """Floating point operations and live memory of tensors, as torch dispatches its operators.

    A matrix product counts 2 operations for each product of two numbers; the operators that make the term (sums of two
    tensors, of which one has a factor) count 2 for each number, or 1 without the factor. Other operators are the same
    with and without the term and are left out. Memory is what tensors hold that were made while counting and are
    still alive, at its highest.
    """

    def __init__(self) -> None:
        self.products = self.sums = 0
        self.live = self.peak = 0
        self.known: set[int] = set()

    def mode(self) -> Any:
        torch, _ = libraries()
        import weakref

        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils.flop_counter import flop_registry

        counter = self

        class Mode(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                packet = func._overloadpacket
                if packet in flop_registry:
                    counter.products += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
                elif packet in (torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub, torch.ops.aten.sub_):
                    factor = (kwargs or {}).get("alpha", 1)
                    counter.sums += result.numel() * (1 if factor == 1 else 2)
                for tensor in result if isinstance(result, tuple | list) else (result,):
                    if isinstance(tensor, torch.Tensor):
                        counter.note(tensor, weakref)
                return result

        return Mode()

    def note(self, tensor: Any, weakref: Any) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.known or size == 0:
            return
        self.known.add(place)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, place, size)

    def forget(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.live -= size


def counted(model: Any, inputs: Any) -> Counter:
    torch, _ = libraries()
    gc.collect()
    counter = Counter()
    with torch.no_grad(), counter.mode():
        result = model(**inputs)
    del result
    return counter


def seconds(run: Callable[[], Any]) -> float:
    """Return processor time, which others on the machine disturb less than time on the clock."""
    start = time.process_time()
    run()
    return time.process_time() - start


@on_one_thread
def run(context: Context) -> Outcome:
    from nlflow.attention import attach

    pair = []
    for _ in range(2):
        model, inputs = random_model("DeiT-tiny")
        pair.append(model.float())
    inputs = {"pixel_values": inputs["pixel_values"].float().repeat(BATCH, 1, 1, 1)}
    stock, term = pair
    attach(term, fidelity=FIDELITY, semi_implicit=False)
    parameters = [sum(p.numel() for p in model.parameters()) for model in pair]
    learned = attach(random_model("DeiT-tiny")[0], fidelity=FIDELITY, learned=True, semi_implicit=False)
    more = sum(p.numel() for p in learned.parameters()) - parameters[0]
    config = stock.config
    context.step("operations and memory")
    counts = [counted(model, inputs) for model in pair]
    tokens = config.image_size**2 // config.patch_size**2 + 2
    numbers = BATCH * tokens * config.hidden_size
    # λ̃ v⁰ and λ̃ v: a product and a sum each, in all layers but the first.
    expected = 4 * numbers * (config.num_hidden_layers - 1)
    extra = counts[1].sums - counts[0].sums
    products = [count.products for count in counts]
    names = context.pick(("forward", "attention, forward", "forward, backward"), ("forward", "attention, forward"))
    times = {name: timed(name, pair, inputs, context) for name in names}
    times[DECODER] = timed(DECODER, *decoders(), context)
    matrix = attach(random_model("DeiT-tiny")[0].float(), fidelity=FIDELITY, matrix_fidelity=True)
    with_matrix = timed("matrix", [stock, matrix], {"pixel_values": inputs["pixel_values"][:1]}, context)
    factor = float(np.median(with_matrix[:, 1]) / np.median(with_matrix[:, 0]))
    ratios = {name: float(np.median(found[:, 1]) / np.median(found[:, 0])) for name, found in times.items()}
    checks = [
        Check("parameters more", parameters[1] - parameters[0], 0),
        Check(
            "parameters more with learned λ̃, one a layer but the first", more, 0, expected=config.num_hidden_layers - 1
        ),
        Check("operations of matrix products more", products[1] - products[0], 0),
        Check("operations of the term against 4 a number", extra, 0, expected=expected),
        Check("operations with the term over without", 1 + extra / products[0], 1.01),
        Check("highest memory of a forward pass with the term over without", counts[1].peak / counts[0].peak, 1.05),
        Check("processor time with a matrix fidelity over without: forward, one picture", factor, MATRIX),
        *(Check(f"processor time with the term over without: {name}", ratio, SLACK) for name, ratio in ratios.items()),
    ]
    details = {
        "model": f"DeiT-tiny, batch {BATCH}, and a GPT-2 of 6 layers with {LENGTH} words, float32, one thread",
        "parameters": parameters[0],
        "operations of matrix products": products[0],
        "operations of the term": extra,
        "highest memory of a forward pass, bytes, without and with": [count.peak for count in counts],
        "processor time, median of interleaved runs, seconds, without and with": {
            name: list(np.median(found, axis=0)) for name, found in times.items()
        },
        "time with the term over without": ratios,
        "quartiles of the ratio of neighbouring runs": {
            name: list(np.quantile(found[:, 1] / found[:, 0], (0.25, 0.5, 0.75))) for name, found in times.items()
        },
    }
    return Outcome(checks, {CAPTION: draw(times)}, details)


def decoders() -> tuple[list[Any], Any]:
    """Return a GPT-2 of 6 layers without and with the term, and 512 random words for both."""
    from nlflow.attention import attach

    torch, _ = libraries()
    shape = {"n_layer": 6, "n_embd": 384, "n_head": 6, "n_positions": LENGTH, "use_cache": False}
    pair = [random_model("GPT-2", **shape)[0].float() for _ in range(2)]
    attach(pair[1], fidelity=FIDELITY, semi_implicit=False)
    words = torch.randint(0, pair[0].config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    return pair, {"input_ids": words}


def timed(name: str, pair: list[Any], inputs: Any, context: Context) -> Any:
    """Return processor times (runs, 2), the two models taking turns."""
    torch, _ = libraries()
    context.step(name)
    (given,) = inputs.values()
    count = context.pick(40, 5) if name != "matrix" else 7
    if name == "attention, forward":
        count *= 4
        # Two layers in a stack of their own: the first gives v⁰, the second has the term, and its MLP has no part.
        tokens = torch.randn(BATCH, 198, pair[0].config.hidden_size, generator=torch.Generator().manual_seed(1))
        calls = [_attention_of_second(model, tokens, given) for model in pair]
    elif name in ("forward", "matrix", DECODER):
        calls = [lambda model=model: model(given) for model in pair]
    else:
        count //= 2
        calls = [lambda model=model: model(given)[0].square().mean().backward() for model in pair]
    found = []
    with torch.set_grad_enabled("backward" in name):
        for call in calls:
            call()
        for turn in range(count):
            order = (0, 1) if turn % 2 == 0 else (1, 0)  # who comes second finds warm memory
            row = [0.0, 0.0]
            for i in order:
                row[i] = seconds(calls[i])
            found.append(row)
    return np.array(found)


def _attention_of_second(model: Any, tokens: Any, pixels: Any) -> Callable[[], Any]:
    """Return a call of the attention module of the second layer as the model itself calls it."""
    from nlflow.attention import blocks

    torch, _ = libraries()
    module = blocks(model)[1].module
    given: dict[str, Any] = {}

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        given.update(args=args, kwargs=kwargs)

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(pixels)  # v⁰ of this call stays in what the module is called with
    handle.remove()
    return lambda: module(*given["args"], **given["kwargs"])


def draw(times: dict[str, Any]) -> Any:
    figure = new_figure(3.5 * len(times), 3.4, dpi=130)
    for number, (axis, (name, found)) in enumerate(zip(figure.subplots(1, len(times)), times.items(), strict=True)):
        for way, label in enumerate(("without", "with the term")):
            axis.step(1e3 * np.sort(found[:, way]), (1 + np.arange(len(found))) / len(found), where="post",
                      color=PALETTE[way], label=label)  # fmt: skip
        finish(axis, name, "processor time, ms", "share of runs up to this" if number == 0 else "")
        if number == 0:
            axis.legend(fontsize=9, frameon=False)
    return figure


CAPTION = (
    f"Processor time on one thread of DeiT-tiny with {BATCH} pictures, of one attention module in it, and of a small "
    "GPT-2, without and with the term, in turns: how many of the runs took up to so long."
)

CLAIM = Claim(
    name="cost-of-the-term",
    title="What the term costs: a parameter a layer at most, a thousandth of the operations",
    statement=(
        f"DeiT-tiny with {BATCH} pictures, with the term λ̃ (v⁰ − v) and without (Appendix G.4 compares the same): "
        "equal parameters, or one more a layer where λ̃ is learned; the same matrix products, and 4 operations more "
        "for each number of v in all layers but the first, counted as torch dispatches them; memory at its highest, "
        "with v⁰ kept, at most 1.05 times as much; processor time on one thread, in turns, of a forward pass, of one "
        f"attention module, of a forward and backward pass (not in the quick form), and of a GPT-2 of {LENGTH} words. "
        "Times are measured figures: "
        f"their bound of {SLACK} (of {MATRIX:g} for a matrix fidelity, whose systems are solved without "
        "forming covariances) catches a copy or a lost fused kernel and not a busy machine; the details have their "
        "medians and quartiles."
    ),
    source=f"{PAPER}, Appendix G.4",
    run=run,
)
