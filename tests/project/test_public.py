"""The public names: light to import, all there, documented by examples that run, and of use without torch."""

from __future__ import annotations

import ast
import copy
import doctest
import importlib
import importlib.util
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import nlflow
from nlflow import Grid, Patch, affinity, from_matrix
from nlflow.affinities import Affinity, sinkhorn
from nlflow.domains import Batch, Mask
from nlflow.flows import Brusselator, FisherKPP, FitzHughNagumo, GrayScott, ParticleFlow, PredatorPrey, trap
from nlflow.kernels import Morse
from tests.names import FOUND

FOLDER = Path(nlflow.__file__).parent
# Kernels are decorated by triton, which builds of torch for the CPU do not bring.
ASIDE = {"nlflow.__main__"}
if importlib.util.find_spec("triton") is None:
    ASIDE |= {f"nlflow.backends.triton.{name}" for name in ("groups", "probe", "search")}
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(FOLDER)], "nlflow.") if module.name not in ASIDE)


def run(code: str) -> str:
    """Run a program in a fresh interpreter, warnings being errors, and return what it prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    loaded = set(run("import sys, nlflow; print(*sys.modules)").split())
    heavy = {"numba", "torch", "matplotlib", "scipy", "skimage", "tqdm", "typer", "imageio", "PIL", "numpy"}
    assert "nlflow" in loaded
    assert loaded & heavy == set()


def test_version() -> None:
    assert nlflow.__version__ == metadata.version("nlflow")
    loaded = set(run("import sys, nlflow; nlflow.__version__; print(*sys.modules)").split())
    assert loaded & {"numpy", "numba", "torch", "typer"} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "heavy"),
    [
        ("Grid", {"numba", "torch", "matplotlib", "scipy", "skimage"}),
        ("InputError", {"numba", "torch", "matplotlib", "scipy", "skimage"}),
        ("solve", {"numba", "torch", "matplotlib", "skimage"}),
        ("affinity", {"numba", "torch", "matplotlib", "skimage"}),
    ],
)
@pytest.mark.sampled(2)
def test_names_load_what_they_need(name: str, heavy: set[str]) -> None:
    loaded = set(run(f"import sys, nlflow; nlflow.{name}; print(*sys.modules)").split())
    assert loaded & heavy == set()


@pytest.mark.parametrize("name", FOUND)
def test_every_name_is_there(name: str) -> None:
    value = getattr(nlflow, name)
    assert value.__doc__
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert value.__name__ == name
    assert value.__module__.startswith("nlflow.")


def test_the_stub_says_what_is_found_from_the_root() -> None:
    """It is what loads the names and what type checkers read; ``import *`` and ``dir`` have the same ones."""
    stub = ast.parse((FOLDER / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    places = {alias.asname: f"nlflow.{node.module}" for node in imports for alias in node.names}
    assert sorted(places, key=str) == FOUND
    assert sorted(dir(nlflow)) == FOUND
    assert (FOLDER / "py.typed").exists()
    for name, place in places.items():
        module = importlib.import_module(place)
        assert getattr(nlflow, str(name)) is getattr(module, str(name))
        assert name in getattr(module, "__all__", [name])
    with pytest.raises(AttributeError, match="nothing"):
        _ = nlflow.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODULES)
def test_modules_list_their_names(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == []


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test.name for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 3


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_the_library_alone() -> None:
    """Without torch and the desk: an image is denoised, a flow integrated, a minimizer found.

    What an extra brings is refused with the command that adds it, in an error that `except ImportError` catches.
    """
    printed = run(
        """
import importlib, sys
for name in ("torch", "matplotlib", "PIL", "skimage", "tifffile", "typer", "sklearn", "xarray"):
    sys.modules[name] = None
import numpy as np
import nlflow
import nlflow.plotting

rng = np.random.default_rng(0)
f = rng.normal(size=(12, 10))
k = nlflow.affinity(nlflow.Patch(1.0, patch_size=3, search_radius=2), nlflow.Grid((12, 10)), f)
energy = nlflow.E(k, f, 0.5, measure="degree")
solution = nlflow.solve(nlflow.GradientFlow(energy, metric="degree"), t=30.0)
print(float(np.abs(solution.u[-1] - energy.minimizer().u).max()))
keys = rng.normal(size=(9, 4))
attention = nlflow.affinity(nlflow.ExpDotProduct(), nlflow.Points(np.arange(9.0)), keys)
print(float(np.ptp(attention.average(keys))))
position = nlflow.affinity(nlflow.Gaussian(width=1.0), nlflow.Grid(40, boundary="periodic"))
print(float(np.ptp(position.average(np.ones(40)))))
image = rng.normal(size=(40, 40))
print(nlflow.denoise(image, 1.0, quality="fast").shape, len(k._repr_html_()) > 100)
for part, name in (("plotting", "new_figure"), ("attention", "attach"), ("learning", "DiffusionMap"), ("xarray", "")):
    try:
        getattr(importlib.import_module(f"nlflow.{part}"), name)()
    except ImportError as error:
        print(isinstance(error, nlflow.InputError), error)
for part in ("flows.derivatives", "denoising.derivatives", "affinities.sharded"):
    try:
        importlib.import_module(f"nlflow.{part}")
    except ImportError as error:
        print(isinstance(error, nlflow.InputError), part, error)
"""
    )
    *figures, shape, refused, layers, points, arrays, flows, images, shards = printed.strip().splitlines()
    distance, spread, rest = map(float, figures)
    assert distance < 1e-5
    assert 0 < spread < 10
    assert rest < 1e-14
    assert shape == "(40, 40) True"
    assert re.match(r"True a figure needs Matplotlib, which is not installed; .*nlflow\[plots\]", refused)
    assert re.match(r"True nlflow.attention needs torch, which is not installed; .*nlflow\[attention\]", layers)
    assert re.match(r"True nlflow.learning needs scikit-learn, which is not installed; .*nlflow\[learning\]", points)
    assert re.match(r"True nlflow.xarray needs xarray, which is not installed; .*nlflow\[xarray\]", arrays)
    for said in (flows, images, shards):
        assert re.match(r"True (\S+) nlflow\.\1 needs torch, which is not installed; .*nlflow\[torch\]", said)


def test_what_users_make_is_copied_and_pickled() -> None:
    f = np.random.default_rng(0).normal(size=12)
    weights = affinity(nlflow.Gaussian(2.0), Grid(12))
    energy = nlflow.E(weights, f, 0.5)
    flow = nlflow.GradientFlow(energy)
    solution = nlflow.solve(flow, f, t=1.0)
    tokens, domain = np.random.default_rng(1).normal(size=(2, 12, 3)), nlflow.Points(np.zeros(12))
    of_tokens = partial(affinity, nlflow.ExpDotProduct(), domain, tokens[0])
    made = (
        flow, solution, weights, energy, energy.minimizer(), nlflow.equilibrium(flow), nlflow.MarkovChain(weights),
        nlflow.GaussianField(energy, beta=1.0), Grid(12), nlflow.Formula("exp(-r)"), nlflow.GaussianNoise(1.0),
        *(affinity(nlflow.Gaussian(2.0), nlflow.Points(np.arange(12.0)[:, None]), method=method)
          for method in ("pairwise", "sparse", "nufft", "lowrank")),
        of_tokens(), of_tokens().scaled(2.0), of_tokens(queries=tokens[1], mask=Mask(causal=True)),
        from_matrix(np.abs(tokens[0] @ tokens[1].T), domain), sinkhorn(nlflow.ExpDotProduct(), domain, tokens[0]),
        nlflow.GradientFlow(nlflow.J(weights), reaction=nlflow.AllenCahn()),
        FisherKPP(), GrayScott(), FitzHughNagumo(), Brusselator(), PredatorPrey(), PredatorPrey(weights),
        ParticleFlow(tokens[0], Morse(), potential=trap()),
        affinity(nlflow.Patch(width=1.0, search_radius=1), Grid((3, 4)), f.reshape(3, 4)),
        affinity(nlflow.ExpDotProduct(), Batch(nlflow.Points(np.zeros(6)), 2), tokens[0].reshape(2, 6, 3)),
    )  # fmt: skip
    for copied in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):  # made a line ago
        again = [copied(one) for one in made]
        assert [type(one) for one in again] == [type(one) for one in made]
        for one, other in zip(made, again, strict=True):
            if isinstance(one, Affinity):
                u = f.reshape(one.domain.shape)
                np.testing.assert_array_equal(other.average(u), one.average(u))
                assert other.evolves == one.evolves
        flow_again, solution_again, *_ = again
        np.testing.assert_array_equal(nlflow.solve(flow_again, f, t=1.0).final, solution.final)
        np.testing.assert_array_equal(solution_again.final, solution.final)


@pytest.mark.slow
def test_same_numbers_in_another_process() -> None:
    """Compiled afresh or loaded from the cache: the same bits, in any number of threads."""
    code = """
import numpy as np
from nlflow import Grid, Patch, affinity, from_matrix
from nlflow.affinities import Affinity, sinkhorn
from nlflow.domains import Batch, Mask
u = np.random.default_rng(0).normal(size=(40, 30))
print(affinity(Patch(1.0, patch_size=3, search_radius=2), Grid((40, 30)), u).average(u).tobytes().hex())
"""
    u = np.random.default_rng(0).normal(size=(40, 30))
    here = affinity(Patch(1.0, patch_size=3, search_radius=2), Grid((40, 30)), u).average(u)
    assert run(code).strip() == here.tobytes().hex()
