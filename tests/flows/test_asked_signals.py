"""What a flow is asked of a signal that it cannot take: named, on arrays and on tensors, outside of `solve` too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import InputError, NumericalError
from nlflow.flows import AveragingFlow, Kuramoto, ParticleFlow, flow
from nlflow.kernels import Interaction

torch = pytest.importorskip("torch")

import tests.pretended as pretended  # noqa: E402

N = 12
POINTS = nl.Points(np.arange(float(N)))


def near(x: Any) -> nl.Affinity:
    return nl.affinity(nl.Gaussian(1.0), POINTS, x)


FLOWS: dict[str, Callable[[Any], Any]] = {
    "J": lambda x: nl.GradientFlow(nl.J(near(x)), "degree"),
    "E": lambda x: nl.GradientFlow(nl.E(near(x), x, 0.5), "l2"),
    "attention": lambda x: nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), POINTS, x)),
    "evolving": lambda x: nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), POINTS, x), evolving=True),
    "system": lambda x: nl.SystemFlow(nl.J(near(x)), [1.0, 0.5]),
    "sphere": lambda x: nl.SphereFlow(nl.on_sphere(x)),
    "wave": lambda x: nl.WaveFlow(nl.GradientFlow(nl.J(near(x)))),
    "averaging": lambda x: AveragingFlow(x, nl.Gaussian(1.0)),
    "particles": lambda x: ParticleFlow(x, Interaction("r*r/2")),
    "oscillators": lambda x: Kuramoto(x[:, 0], 1.0),
    "p": lambda x: nl.PFlow(nl.Jp(near(x), p=1.5)),
}
ANY_WIDTH = ("J", "attention", "evolving", "p", "wave")  # of signals
ARRAYS = ("p",)


def start(name: str, x: Any) -> Any:
    return x[:, 0] if name == "oscillators" else nl.on_sphere(x) if name == "sphere" else x


def drawn(kind: str) -> Any:
    x = np.random.default_rng(0).standard_normal((N, 2)).astype(np.float32)
    return torch.from_numpy(x) if kind == "tensor" else x


def cases() -> list[Any]:
    return [(name, kind) for name in FLOWS for kind in ("array", "tensor") if (name, kind) != ("p", "tensor")]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.on_cpu("says what is on which device itself")
@pytest.mark.parametrize(("name", "kind"), cases())
def test_a_signal_of_another_shape_dtype_or_kind_is_named(name: str, kind: str) -> None:
    x = drawn(kind)
    made, u = FLOWS[name](x), start(name, x)
    wrong = {
        "got list": u.tolist(),
        "got shape": u[:-1],
        "dtype|expected .* of (torch.)?float32": u.double() if kind == "tensor" else u.astype(np.float64),
        "dtype|of (torch.)?float16": u.half() if kind == "tensor" else u.astype(np.float16),
        "got dtype|got a tensor|got ndarray|got Tensor": u.numpy() if kind == "tensor" else torch.from_numpy(u),
    }
    if name not in ANY_WIDTH:
        wrong |= {"got shape .* expected": u[:, :1] if u.ndim > 1 else u[:, None]}
    if kind == "tensor":
        wrong |= {"it is on meta": u.to("meta"), "layout": u.to_sparse(), "nested": torch.nested.nested_tensor([u[:3]])}
    for words, given in wrong.items():
        with pytest.raises(InputError, match=f"^u: .*({words})"):
            made.velocity(given)
    for act, others in {"energy": (), "speed": (), "distance_to_constant": (), "jacobian": (u,)}.items():
        with pytest.raises(InputError, match=r"^u: got shape"):
            getattr(made, act)(u[:-1], *others)


@pytest.mark.on_cpu("puts a tensor on the pretended GPU itself")
@pytest.mark.parametrize("name", [name for name in FLOWS if name not in ARRAYS])
def test_a_signal_on_another_device_is_named(name: str) -> None:
    x = drawn("tensor")
    made = FLOWS[name](x)
    with pretended.gpu():
        there = pretended.put(start(name, x))
        for act in ("velocity", "energy"):
            with pytest.raises(InputError, match=r"^u: it is on cuda:0, expected cpu"):
                getattr(made, act)(there)


@pytest.mark.parametrize(("name", "kind"), cases())
def test_of_nan_comes_nan_or_an_error_that_names_it(name: str, kind: str) -> None:
    x = drawn(kind)
    made, u = FLOWS[name](x), start(name, x)
    u = u.clone() if kind == "tensor" else u.copy()
    u[3] = float("nan")
    try:
        assert not np.isfinite(np.asarray(made.velocity(u))[3]).any()
    except (InputError, NumericalError) as error:
        assert "NaN" in str(error)  # noqa: PT017  # either is right


@pytest.mark.parametrize("name", [name for name in FLOWS if name not in ARRAYS])
def test_a_velocity_keeps_its_digits_under_autocast(name: str) -> None:
    x = drawn("tensor")
    made, u = FLOWS[name](x), start(name, x)
    expected = made.velocity(u), made.energy(u)
    with torch.autocast(u.device.type, torch.bfloat16):
        found = made.velocity(u), made.energy(u)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1] or np.isnan(found[1])


def test_what_a_run_does_is_looked_at_once() -> None:
    """The start is looked at; what steps make of it is not, but that of another flow inside of a run is."""
    x, looks = drawn("array"), []

    class Watched(nl.GradientFlow):
        def check_kind(self, name: str, u: Any) -> None:
            looks.append(name)
            super().check_kind(name, u)

    made = Watched(nl.J(near(x)), "degree")
    nl.solve(made, x, t=1.0, integrator=nl.RungeKutta(dt=0.1, adaptive=False))
    assert looks == ["start"]
    other = FLOWS["system"](x)
    with made.looking_at(x), pytest.raises(InputError, match=r"^u: got shape"):
        other.velocity(x[:-1])
    assert flow._looked_at.get() is None
