"""Tensors that cannot be computed with are named wherever tensors come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow._array import on_host
from nlflow.attention import NeutrenoAttention
from nlflow.denoising import denoise, problem
from nlflow.flows import ParticleFlow
from nlflow.kernels import Morse
from nlflow.learning import HarmonicClassifier
from tests import pretended
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

N = 12
POINTS = nl.Points(np.arange(float(N)))
X, U = torch.from_numpy(np.random.default_rng(0).standard_normal((2, N, 3)))
POSITIVE = U.abs() + 1
SMOOTH = nl.affinity(nl.Gaussian(1.0), POINTS, X)


def classified(x: Any = X, y: Any = None) -> Any:
    return HarmonicClassifier().fit(x, np.arange(N) % 2 if y is None else y)


def learnable(x: Any) -> Any:
    return x.requires_grad_()


# The argument that a tensor is, one that serves, and what takes it.
ENTRIES: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "features": ("features", X, lambda x: nl.affinity(nl.Gaussian(1.0), POINTS, x)),
    "queries": ("queries", X, lambda x: nl.affinity(nl.ExpDotProduct(), POINTS, X, queries=x)),
    "nodes": ("nodes", X, nl.Points),
    "weights": ("weights", POSITIVE[:, 0], lambda x: nl.Points(np.arange(float(N)), x)),
    "average": ("u", U, SMOOTH.average),
    "push": ("law", POSITIVE, SMOOTH.push),
    "start": ("start", U, lambda x: nl.solve(nl.GradientFlow(nl.J(SMOOTH)), x, t=1.0)),
    "value": ("u", U, nl.J(SMOOTH).value),
    "observed": ("observed", U, lambda x: nl.E(SMOOTH, x, 0.5)),
    "equilibrium": ("observed", U, lambda x: nl.equilibrium(nl.E(SMOOTH, x, 0.5))),
    "image": ("image", torch.rand(N, N, dtype=torch.float64), lambda x: denoise(x, 0.1)),
    "samples": ("X", X, classified),
    "targets": ("y", torch.arange(N) % 2, lambda y: classified(y=y)),
}
# What is held in the host's memory, or has numbers of another kind.
BESIDE: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "fidelity": ("fidelity", POSITIVE[:, 0], lambda x: nl.E(SMOOTH, U, x)),
    "matrices": ("fidelity", torch.eye(3).expand(N, 3, 3).double().contiguous(), lambda x: nl.E(SMOOTH, U, x)),
    "constrained nodes": ("nodes", torch.arange(2), lambda x: nl.Constraint(x, 1.0)),
    "constrained values": ("values", U[:2], lambda x: nl.Constraint([0, 1], x)),
    "start of a law": ("start", torch.arange(2), lambda x: nl.MarkovChain(SMOOTH).law(x)),
    "source": ("source", torch.arange(2), lambda x: nl.MarkovChain(SMOOTH).committor(x, 5)),
    "present": ("present", torch.ones(N, dtype=torch.bool), lambda x: nl.Mask(present=x)),
    "matrix": ("matrix", torch.ones(N, N, dtype=torch.float64), lambda x: nl.from_matrix(x, POINTS)),
    "graph": ("graph", torch.ones(N, N, dtype=torch.float64), nl.affinity_from_graph),
}
UNREADABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "meta": (lambda x: x.to("meta"), r"it is on meta, .*expected (a tensor on )?cpu"),
    "sparse": (lambda x: x.to_sparse(), r"got a tensor of layout torch.sparse_coo, expected a dense one; use \.to_de"),
    "nested": (lambda x: torch.nested.nested_tensor([x[:1], x[1:]]), "got a nested tensor, expected one of a single"),
    "jagged": (lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged), "got a nested tensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("entry", [*ENTRIES, *BESIDE])
def test_what_cannot_be_read_is_named(entry: str, kind: str) -> None:
    name, given, call = (ENTRIES | BESIDE)[entry]
    spoil, reason = UNREADABLE[kind]
    if (entry, kind) == ("graph", "sparse"):
        reason = "got a torch tensor of layout torch.sparse_coo, expected a dense one or an edge list"
    with pytest.raises(nl.InputError, match=f"{name}: {reason}"):
        call(spoil(given))


@pytest.mark.parametrize("entry", [name for name in ENTRIES if name not in ("samples", "targets")])
def test_a_float_of_eight_bits_has_no_digits_to_average(entry: str) -> None:
    name, given, call = ENTRIES[entry]
    with pytest.raises(nl.InputError, match=rf"{name}: got torch.float8_e4m3fn, .* convert it with \.float\(\)"):
        call(given.float().to(torch.float8_e4m3fn))


@pytest.mark.parametrize("spoil", [learnable, lambda x: x.bfloat16(), lambda x: x], ids=["learnable", "short", "plain"])
def test_a_flow_of_arrays_alone_takes_no_tensor(spoil: Any) -> None:
    for call in (nl.nonlocal_tv, problem):
        with pytest.raises(nl.InputError, match=r"^image: got Tensor, expected a NumPy array; convert it"):
            call(spoil(torch.rand(N, N, dtype=torch.float64)), 0.1)


@pytest.mark.parametrize("entry", ["features", "average", "start", "observed", "nodes", "weights", "samples", "image"])
def test_a_view_that_is_the_negative_of_another_is_read_as_any(entry: str) -> None:
    """The imaginary part of a conjugate is one; NumPy does not read it."""
    _, given, call = ENTRIES[entry]
    view = torch.complex(given, -given).conj().imag
    assert view.is_neg()
    call(view)
    assert np.array_equal(on_host(view), given.numpy())


@pytest.mark.parametrize("entry", ["samples", "targets", "features", "nodes"])
def test_sixteen_bits_are_read_as_single_precision(entry: str) -> None:
    _, given, call = ENTRIES[entry]
    call(given.bfloat16())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # PyTorch gives them up
@pytest.mark.parametrize("entry", ["start", "samples", "targets", "features", "fidelity"])
def test_a_quantized_tensor_holds_codes(entry: str) -> None:
    name, given, call = (ENTRIES | BESIDE)[entry]
    codes = torch.quantize_per_tensor(given.float(), 0.1, 0, torch.quint8)
    with pytest.raises(nl.InputError, match=rf"{name}: got a quantized tensor of torch.quint8, .*\.dequantize\(\)"):
        call(codes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("look", [nl.estimate_sigma, nl.estimate_noise])
@pytest.mark.parametrize("spoil", [*[spoil for spoil, _ in UNREADABLE.values()], lambda x: x.bfloat16(), learnable])
def test_noise_is_found_in_arrays(look: Callable[[Any], Any], spoil: Callable[[Any], Any]) -> None:
    with pytest.raises(nl.InputError, match="image: "):
        look(spoil(torch.rand(N, N)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_a_nested_sigma_has_no_shape() -> None:
    image = torch.rand(N, N)
    with pytest.raises(nl.InputError, match="sigma: got a nested tensor"):
        denoise(image, torch.nested.nested_tensor([image, image[:3]]))


def test_particles_are_no_features() -> None:
    flow = ParticleFlow(X, Morse())
    for given, words in ((X.float(), "got Tensor of torch.float32, expected Tensor of torch.float64"),
                         (X[:3], "got shape .3, 3., expected .12, 3., positions of the particles"),
                         (X.numpy(), "got ndarray of float64, expected Tensor of torch.float64")):  # fmt: skip
        with pytest.raises(nl.InputError, match=f"start: {words}") as told:
            nl.solve(flow, given, t=0.1)
        assert "features" not in str(told.value)


@pytest.mark.parametrize("entry", ["average", "push", "start", "value", "observed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_signal_of_doubles(entry: str, dtype: Any) -> None:
    name, given, call = ENTRIES[entry]
    with pytest.raises(nl.InputError, match=f"{name}: got dtype torch.float32, expected torch.float64"):
        call(given.to(dtype))


@pytest.mark.parametrize("entry", ["queries", "average", "push", "start", "value", "observed"])
def test_the_other_device_is_named(entry: str) -> None:
    name, given, call = ENTRIES[entry]
    with pretended.gpu(), pytest.raises(nl.InputError, match=f"{name}: it is on cuda:0, expected cpu.* move one of th"):
        call(pretended.put(given))


@pytest.mark.parametrize("entry", ["features", "image", "samples"])
def test_nothing_is_captured_that_the_host_waits_for(entry: str) -> None:
    """A graph that is replayed would do without the checks, and keep the steps of other numbers."""
    name, given, call = ENTRIES[entry]
    with pretended.gpu():
        there = pretended.put(given)
        call(there)
        for _ in range(2):  # a second capture is told the same
            with pretended.capturing(), pytest.raises(nl.InputError, match=f"{name}: a CUDA graph is being captured"):
                call(there)


def test_devices_that_are_not_there() -> None:
    with pretended.gpu(), pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3, device="cuda:3")
    with pretended.gpu(), pytest.raises(nl.InputError, match="device: got 'cuda:3', expected one of 'auto', 'cpu', 'c"):
        denoise(np.zeros((8, 8)), 0.1, device="cuda:3")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_tokens_of_a_layer() -> None:
    layer, tokens = NeutrenoAttention(8, 2), torch.randn(2, 5, 8)
    with pytest.raises(nl.InputError, match="tokens: got a nested tensor"):
        layer(torch.nested.nested_tensor([tokens[0], tokens[1, :3]]))
    with pytest.raises(nl.InputError, match=r"tokens: got a tensor of layout torch\.sparse_coo"):
        layer(tokens.to_sparse())
    with pretended.gpu(), pytest.raises(nl.InputError, match="tokens: they are on cuda:0, expected cpu, where this la"):
        layer(pretended.put(tokens))
