"""Argument checks: what they let pass unchanged, and the words for what they do not."""

from __future__ import annotations

import decimal
import fractions
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import errors
from nlflow.denoising import noise
from nlflow.denoising.noise.risk import perturbation
from nlflow.errors import (
    FileFormatError,
    InputError,
    MemoryLimitError,
    NlflowError,
    NlflowWarning,
    NumericalError,
    StabilityError,
    check_array,
    check_choice,
    check_integer,
    check_memory,
    check_number,
    format_bytes,
    memory_limit,
    shortened,
)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (InputError, ValueError),
        (StabilityError, InputError),
        (NumericalError, ArithmeticError),
        (MemoryLimitError, MemoryError),
        (FileFormatError, ValueError),
    ],
)
def test_every_error_is_an_nlflow_error_and_a_builtin_one(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, NlflowError)
    assert issubclass(error, builtin)
    assert issubclass(NlflowWarning, UserWarning)


def test_all_names_exist() -> None:
    assert [name for name in errors.__all__ if not hasattr(errors, name)] == []


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, 2.0),
        (2.5, 2.5),
        (-0.0, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(1.5), 1.5),
        (fractions.Fraction(1, 4), 0.25),
        (decimal.Decimal("0.125"), 0.125),
        (1e-320, 1e-320),
    ],
)
def test_numbers_that_pass(value: Any, expected: float) -> None:
    number = check_number("x", value)
    assert type(number) is float
    assert number == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        np.bool_(True),
        np.array(True),
        "1",
        b"1",
        1j,
        np.complex128(1),
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        [1.0],
        (1.0, 2.0),
        {},
        np.array([1.0, 2.0]),
        np.array([]),
        np.array([1.0]),
        np.ma.masked,
        np.float64,
        np.array(1j),
        pytest.param(object(), id="object"),
        10**400,
    ],
    ids=lambda value: repr(value)[:30],
)
def test_numbers_that_do_not(value: Any) -> None:
    with pytest.raises(InputError, match=r"^size: got .*, expected a finite real number; try another$"):
        check_number("size", value, hint="try another")


def test_bounds_of_numbers() -> None:
    assert check_number("x", 0, minimum=0) == 0
    assert check_number("x", math.inf, minimum=0, finite=False) == math.inf
    assert check_number("x", 1e-300, minimum=0, strict=True) == 1e-300
    with pytest.raises(InputError, match=r"^x: got -1, expected a finite real number >= 0$"):
        check_number("x", -1, minimum=0)
    with pytest.raises(InputError, match=r"^x: got 0, expected a finite real number > 0$"):
        check_number("x", 0, minimum=0, strict=True)
    with pytest.raises(InputError, match=r"^x: got 0.25, expected a real number >= 0.5$"):
        check_number("x", 0.25, minimum=0.5, finite=False)
    with pytest.raises(InputError, match=r"^x: got nan, expected a real number$"):
        check_number("x", math.nan, finite=False)
    with pytest.raises(InputError, match=r"^x: got -inf, expected a real number >= 0$"):
        check_number("x", -math.inf, minimum=0, finite=False)


def test_torch_scalars_are_numbers() -> None:
    torch = pytest.importorskip("torch", reason="scalars of another namespace")
    assert check_number("x", torch.tensor(2.0)) == 2.0
    for value in (torch.tensor([1.0, 2.0]), torch.tensor([1.0]), torch.tensor(True), torch.tensor(1j)):
        with pytest.raises(InputError, match=r"x: got tensor\("):
            check_number("x", value)
        with pytest.raises(InputError, match=r"x: got tensor\("):
            check_integer("x", value.to(torch.int64) if value.ndim else value)


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(InputError) as caught:
        check_number("x", "a" * 1000)
    assert len(str(caught.value)) < 120
    assert "..." in str(caught.value)


# --- integers and choices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_integers_that_pass(value: Any) -> None:
    number = check_integer("n", value, minimum=3, odd=True)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize(
    "value",
    [None, True, np.bool_(True), np.int64, 3.0, np.float64(3), "3", [3], np.array([3, 5]), 1j, 4, 1, 2**63 - 1],
)
def test_integers_that_do_not(value: Any) -> None:
    with pytest.raises(InputError, match=r"^n: got .*, expected an odd integer >= 3.*; patches have a centre$"):
        check_integer("n", value, minimum=3, odd=True, hint="patches have a centre")


def test_seeds_may_be_longer_than_counts() -> None:
    assert errors.check_seed("seed", 2**127) == 2**127
    with pytest.raises(InputError, match=r"^seed: got -1, expected an integer >= 0$"):
        errors.check_seed("seed", -1)


SIGNAL = np.linspace(0, 1, 16)
SWITCHES: dict[str, Callable[[Any], Any]] = {
    "preserve_range": lambda flag: nl.denoise(SIGNAL, 0.0, preserve_range=flag),
    "return_info": lambda flag: nl.denoise(SIGNAL, 0.0, return_info=flag),
    "progress": lambda flag: nl.denoise(SIGNAL, 0.1, progress=flag),
    "isotropic": lambda flag: nl.nonlocal_tv(SIGNAL, 0.1, isotropic=flag),
    "progress of a study": lambda flag: nl.run_study("mixing", nodes=4, progress=flag),
}


@pytest.mark.parametrize("flag", ["False", 1, None, np.ones(2)], ids=str)
@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_no_flag_is_not_read_as_one(name: str, flag: Any) -> None:
    with pytest.raises(InputError, match=r"^[a-z_]+: got .*, expected True or False(, or a callable of .*)?$"):
        SWITCHES[name](flag)


def test_integers_without_bounds() -> None:
    assert check_integer("n", -(10**30)) == -(10**30)
    assert check_integer("n", -3, odd=True) == -3
    with pytest.raises(InputError, match=r"^n: got 0.5, expected an integer$"):
        check_integer("n", 0.5)


@pytest.mark.parametrize("rng", [-1, "seven", 1.5, [-3], True, np.ones((1, 2)).view(np.matrix)])
def test_what_is_no_seed_is_named_wherever_something_is_drawn(rng: Any) -> None:
    square, line = np.ones((4, 4)), np.linspace(0, 1, 40)[:, None]
    approximate = nl.affinity(nl.Gaussian(1.0), nl.Points(line), method="lowrank", rtol=1e-6)
    for draw in (
        lambda: noise.GaussianNoise(1.0).sample(square, rng=rng),
        lambda: noise.Mixture([noise.GaussianNoise(1.0)]).sample(square, rng=rng),
        lambda: perturbation((3, 3), rng=rng),
        lambda: approximate.measure_error(rng=rng),
        lambda: errors.check_generator(rng),
    ):
        with pytest.raises(InputError, match=r"^rng: got .*, expected a seed >= 0 or a numpy.random.Generator"):
            draw()
    assert errors.check_generator(3).integers(100) == np.random.default_rng(3).integers(100)


def test_choices() -> None:
    assert check_choice("metric", "l2", ("l2", "degree")) == "l2"
    for value in ("L2", "", None, 2, ["l2"], ("l2", "degree")):
        with pytest.raises(InputError, match=r"^metric: got .*, expected one of 'l2', 'degree'$"):
            check_choice("metric", value, ("l2", "degree"))


# --- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.float32, np.float32),
        (np.float64, np.float64),
        (np.float16, np.float32),
        (np.longdouble, np.float64),
        (np.int8, np.float64),
        (np.uint64, np.float64),
        (bool, np.float64),
        (">f8", np.float64),
        (">f4", np.float32),
        (">f2", np.float32),
        ("<f4", np.float32),
    ],
)
def test_dtypes_of_arrays(given: Any, dtype: Any) -> None:
    array = check_array("u", np.array([[0, 1], [1, 0]]).astype(given))
    assert array.dtype == dtype
    assert array.dtype.isnative
    np.testing.assert_array_equal(array, [[0, 1], [1, 0]])


def test_arrays_that_fit_are_not_copied() -> None:
    for array in (np.ones((2, 3)), np.ones((2, 3), np.float32), np.ones((4, 6))[::2, ::2]):
        assert check_array("u", array) is array
    assert check_array("u", [1, 2]).tolist() == [1.0, 2.0]
    assert check_array("u", 3.0).shape == ()


class Shy:
    """What says no by itself, as a dataset of xarray does."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("take one of my variables")

    def __repr__(self) -> str:
        return "Shy"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ma.masked_array([1.0, 2.0], [True, False]), "got a masked array, expected a plain one; fill it$"),
        (np.ma.masked_array([1.0, 2.0]), "got a masked array"),
        (np.array([1j]), r"got complex values \(complex128\), expected real ones; pass .real or abs\(\)"),
        (["a"], "got dtype <U1, expected a real numeric array; see there"),
        (np.array(["2020-01-01"], "M8[D]"), r"got dtype datetime64\[D\], expected a real numeric array"),
        (None, "got None, expected a real numeric array"),
        (True, "got True, expected a real numeric array; see there"),
        (np.False_, "got False, expected a real numeric array"),
        ({"a": 1}, "got dtype object, expected a real numeric array"),
        (np.array([1, None]), "got dtype object"),
        (
            [[1.0], [1.0, 2.0]],
            r"got \[\[1.0\], \[1.0, 2.0\]\], expected a real numeric array; see .* uneven lengths",
        ),
        (Shy(), "got Shy, expected a real numeric array; see there"),
        (np.ones(3), r"got 1 dimension\(s\) \(shape \(3,\)\), expected 2 or 3; see there"),
        (1.0, r"got 0 dimension\(s\) \(shape \(\)\), expected 2 or 3; see there"),
        (np.ones((2, 0)), r"got an empty array of shape \(2, 0\), expected at least one element; see there"),
        (
            np.array([[1, np.nan, np.inf]]),
            r"got 2 NaN or infinite value\(s\) \(the first at index .*\), expected finite ones; replace",
        ),
    ],
)
def test_arrays_that_do_not_pass(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=r"^u: " + message if message.startswith("got") else "^u: .*" + message):
        check_array("u", value, ndim=(2, 3), hint="see there")


PATH = nl.affinity(nl.Gaussian(1.0), nl.Grid(4, boundary="isolated"))
SQUARE = nl.Grid((4, 4), boundary="isolated")
WHOLE, FLAGS, LEVELS = (np.ma.array(np.eye(4, dtype=kind), mask=np.eye(4) == 0) for kind in (int, bool, float))
UNMASKED: dict[str, Any] = {
    "nodes": lambda: nl.Constraint(WHOLE[0], 0.0),
    "values": lambda: nl.Constraint([0, 3], lambda t: LEVELS[0, :2]).on(PATH).at(0.0, np.zeros(4)),
    "start": lambda: nl.MarkovChain(PATH).walk(WHOLE[0], 1, walkers=4),
    "start of a law": lambda: nl.MarkovChain(PATH).law(WHOLE[0, 1], 1),
    "target": lambda: nl.MarkovChain(PATH).hitting_times(FLAGS[0]),
    "present": lambda: nl.Mask(present=FLAGS[0]),
    "inside": lambda: nl.FractionalLaplacian(SQUARE, 0.5, inside=FLAGS),
    "mask": lambda: nl.denoise(np.eye(4), 1.0, mask=FLAGS),
    "keep": lambda: nl.denoise(np.eye(4), 1.0, keep=FLAGS),
    "keep of channels": lambda: nl.denoise(np.eye(4), 1.0, channel_axis=-1, separate=True, keep=FLAGS[0]),
    "sigma": lambda: nl.denoise(np.eye(4), LEVELS, strength=2.0),
    "sigma of channels": lambda: nl.denoise(np.eye(4), LEVELS[0], channel_axis=-1, separate=True),
}


@pytest.mark.parametrize("name", UNMASKED)
def test_masks_are_nowhere_left_out_in_silence(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name.split()[0]}: got a masked array, expected a plain one; fill it$"):
        UNMASKED[name]()


EDGES = nl.affinity_from_graph(np.ones((4, 4)))
FLAGGED: dict[str, Any] = {
    "definite": lambda flag: nl.Formula("exp(-r)", definite=flag),
    "store": lambda flag: nl.affinity(nl.Patch(1.0, 1, 1), SQUARE, np.eye(4), store=flag),
    "isotropic": lambda flag: nl.Jp(EDGES, 1.0, isotropic=flag),
    "normalize": lambda flag: nl.J(PATH).value(np.ones(4), normalize=flag),
}


@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.parametrize("flag", ["no", 0, None, np.zeros(2)])
def test_flags_are_true_or_false(name: str, flag: Any) -> None:
    with pytest.raises(InputError, match=f"^{name}: got .*, expected True or False$"):
        FLAGGED[name](flag)


# An instance has its place there, or a function.
CLASSES: dict[str, Any] = {
    "integrator: got the class RungeKutta": lambda: nl.solve(nl.GradientFlow(nl.J(PATH)), np.ones(4), t=1.0,
                                                             integrator=nl.RungeKutta),
    "domain: got the class Grid": lambda: nl.affinity(nl.Gaussian(1.0), nl.Grid),
    "domain: got the class Points": lambda: nl.affinities.Unlinked(nl.Points),  # type: ignore[arg-type]
    "mask: got the class Mask": lambda: nl.sinkhorn(nl.Gaussian(1.0), SQUARE, mask=nl.Mask),
    "k: got the class Gaussian": lambda: nl.Formula(nl.Gaussian),
    "w: got the class Gaussian": lambda: nl.kernels.Interaction(nl.Gaussian),
    "function: got the class float": lambda: nl.Reaction(float, (0, 1), bound=1.0),
    "function: got the class Energy": lambda: nl.Callback(nl.Energy),
    "gradient: got the class float": lambda: nl.flows.External(abs, float),
    "source: got dtype object": lambda: nl.GradientFlow(nl.J(PATH), source=nl.Source),
    "values: got dtype object": lambda: nl.Constraint([0], nl.Source),
    "observed: got the class Source": lambda: nl.GradientFlow(nl.E(PATH, np.ones(4), 1.0), observed=nl.Source),
}  # fmt: skip


@pytest.mark.parametrize("message", CLASSES)
def test_a_class_is_no_instance_and_no_function(message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}, expected "):
        CLASSES[message]()


def test_one_number_of_dimensions() -> None:
    assert check_array("u", np.ones((2, 2)), ndim=2).shape == (2, 2)
    with pytest.raises(InputError, match=r"expected 1$"):
        check_array("u", np.ones((2, 2)), ndim=1)


def test_arrays_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="arrays of another namespace")
    for dtype in (torch.float32, torch.float64):
        tensor = torch.ones(3, dtype=dtype)
        assert check_array("u", tensor) is tensor
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(InputError, match=f"u: got a torch tensor of dtype {dtype}, expected a floating-point one"):
            check_array("u", torch.ones(3, dtype=dtype))
    with pytest.raises(InputError, match=r"u: got 1 NaN or infinite value\(s\)"):
        check_array("u", torch.tensor([1.0, math.nan]))
    with pytest.raises(InputError, match=r"u: got an empty array of shape \(0,\)"):
        check_array("u", torch.ones(0))
    with pytest.raises(InputError, match=r"u: got 1 dimension\(s\)"):
        check_array("u", torch.ones(3), ndim=2)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**40, "1 TiB"),
        (5 * 2**50, "5120 TiB"),
    ],
)
def test_bytes_in_words(count: float, words: str) -> None:
    assert format_bytes(count) == words


def test_default_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NLFLOW_MEMORY_LIMIT", raising=False)
    limit = memory_limit()
    assert isinstance(limit, int)
    assert 2**27 < limit < 2**50


@pytest.mark.parametrize("broken", [OSError, ValueError])
def test_default_limit_where_the_system_does_not_tell(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise broken(name)

    monkeypatch.delenv("NLFLOW_MEMORY_LIMIT", raising=False)
    monkeypatch.setattr("os.sysconf", refuse)
    assert memory_limit() == 8 * 2**30


def test_default_limit_where_the_system_says_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NLFLOW_MEMORY_LIMIT", raising=False)
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else -1)
    assert memory_limit() == 8 * 2**30


def test_limit_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "12345")
    assert memory_limit() == 12345
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1e9")
    assert memory_limit() == 10**9
    for text in ("", "1 GB", "-5", "0", "many", "nan"):
        monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", text)
        with pytest.raises(InputError, match=r"^NLFLOW_MEMORY_LIMIT: got "):
            memory_limit()


def test_memory_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "2048")
    check_memory("a table", 2048, "use less")
    check_memory("a table", 10**12, "use less", 1e12)
    check_memory("a table", 10**30, "use less", math.inf)
    with pytest.raises(MemoryLimitError) as caught:
        check_memory("a table", 3072, "use less")
    assert str(caught.value) == "a table needs 3 KiB (3072 bytes), the limit is 2 KiB; use less"
    with pytest.raises(MemoryLimitError, match="the limit is 1 KiB"):
        check_memory("a table", 2048, "use less", 1024)
    for limit in (0, -1, math.nan, "1 GB"):
        with pytest.raises(InputError, match=r"^memory_limit: got "):
            check_memory("a table", 1, "use less", limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, 0.5, 0.999])
def test_number_below_an_upper_end(value):
    assert check_number("share", value, minimum=0, below=1) == value


@pytest.mark.parametrize("value", [-0.1, 1.0, 2, math.inf, math.nan])
def test_number_beyond_an_upper_end(value):
    with pytest.raises(InputError, match=r"share: got .*, expected a finite real number >= 0 and < 1"):
        check_number("share", value, minimum=0, below=1)


def test_long_texts_are_shortened() -> None:
    assert shortened("  two\n lines ") == "two lines"
    assert shortened("x" * 160) == "x" * 160
    assert shortened("x" * 161) == "x" * 157 + "..."
    assert shortened("abcdefgh", 6) == "abc..."
    assert shortened(ValueError()) == "ValueError"


def test_what_is_missing_is_installed_for_the_python_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a b/python")
    assert errors.install_command("torch") == "'/a b/python' -m pip install 'nlflow[torch]'"
    monkeypatch.setattr(sys, "executable", "")
    assert errors.install_command("torch") == "python -m pip install 'nlflow[torch]'"


def in_a_pipeline() -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from nlflow.learning import HarmonicClassifier

    points = np.concatenate([np.linspace(0, 1, 8), np.linspace(100, 101, 8)])[:, None]
    make_pipeline(StandardScaler(), HarmonicClassifier(n_neighbors=3)).fit(points, [0, 1, 1] + [-1] * 13)


def by_blocks() -> None:
    dask = pytest.importorskip("dask.array", reason="dask is compared with where it is installed")
    from nlflow.denoising.large import denoise_array

    denoise_array(dask.zeros((48, 48), chunks=24, dtype=np.uint8), sigma=0.2)


@pytest.mark.parametrize("call", [in_a_pipeline, by_blocks])
def test_a_warning_names_the_line_of_the_user(call):
    with pytest.warns(NlflowWarning) as told:
        call()
    assert {one.filename for one in told if issubclass(one.category, NlflowWarning)} == {__file__}
