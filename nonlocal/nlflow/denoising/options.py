"""Options of `denoise`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from nlflow.backends.devices import DEVICES
from nlflow.errors import InputError, KeywordError, check_choice, check_flag, check_integer, check_number, check_seed

QUALITIES: Final = ("fast", "balanced", "best", "pixels")
STOPPING: Final = ("discrepancy", "sure")
OF_PIXELS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "width": lambda n, v: check_number(n, v, minimum=0, strict=True),
    "patch_size": lambda n, v: check_integer(n, v, minimum=1, odd=True),
    "search_radius": lambda n, v: check_integer(n, v, minimum=1),
    "fidelity": lambda n, v: check_number(n, v, minimum=0),
    "steps": lambda n, v: check_integer(n, v, minimum=1),
}
"""The options that the flow of pixels alone has, with their checks."""
_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "strength": lambda n, v: check_number(n, v, minimum=0),
    "separate": check_flag,
    "stopping": lambda n, v: check_choice(n, v, STOPPING),
    "max_memory": lambda n, v: check_number(n, v, minimum=1, finite=False),
    "seed": check_seed,
    "device": lambda n, v: check_choice(n, v, DEVICES),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `nlflow.denoise` can be asked for beside the image, its noise and its axes.

    ``denoise(image, options=Options(strength=0.8))`` is ``denoise(image, strength=0.8)``.

    Parameters
    ----------
    strength : float
        Multiple of the noise that is removed: above 1 for smoother results, below 1 for more detail. A `Poisson` that
        is given takes only 1.
    separate : bool
        Denoise each channel as if it were alone, for channels that have nothing to do with each other, such as the
        columns of a table.
    stopping : {'discrepancy', 'sure'}, optional
        Which estimate on the flow's path to return: the one whose residual is nearest to the noise, or the one of least
        mean squared error by Stein's estimate with Monte-Carlo divergence (a second run; the estimate is
        ``info.risk``). By default the flow's own rule ends it. With `stopping` ``noise='auto'`` is 'white'; noise that
        is correlated, or Gaussian and follows the intensity, is refused.
    max_memory : float, optional
        Bytes of working memory; half of the physical memory by default (`nlflow.errors.memory_limit`), on a GPU what is
        free there. If the work does not fit, ``pixels`` computes its weights anew at each step, and groups run in
        strips.
    width : float, optional
        Of ``pixels``: filter parameter h in the units of the input. With a map of sigma it follows that, and this is
        its root mean square. By default h = 1.9 s n^(-1/4), n being the samples in a patch (channels count) and s the
        noise that a Gaussian of 0.55 samples leaves.
    patch_size : int, optional
        Of ``pixels``: side of the patches, odd, at most twice the longest side of the image less 1.
    search_radius : int, optional
        Of ``pixels``: half side of the search window. Its weights fall off as a Gaussian whose standard deviation is
        0.6 times this.
    fidelity : float, optional
        Of ``pixels``: a constant lambda~ in place of the local one; 0 for the J-flow.
    steps : int, optional
        Of ``pixels``: exactly this many steps, in place of the stopping rule.
    seed : int
        Seed of the random signs of Stein's estimate: for ``stopping='sure'``, and for recordings whose noise is found
        out.
    device : {'cpu', 'auto', 'cuda', 'cpu-tensors'}
        Where the flow of groups of an array runs: compiled loops, or tensors (extra ``torch``); 'auto' takes a GPU
        where there is one. ``pixels`` and clips refuse 'cuda' and 'cpu-tensors'. For tensors, which stay on
        their device, only 'cpu', the default.

    Raises
    ------
    InputError
        Naming the option.

    Examples
    --------
    >>> from nlflow.denoising import Options
    >>> Options(strength=0.8, seed=3).strength
    0.8
    """

    strength: float = 1.0
    separate: bool = False
    stopping: str | None = None
    max_memory: float | None = None
    width: float | None = None
    patch_size: int | None = None
    search_radius: int | None = None
    fidelity: float | None = None
    steps: int | None = None
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, check in {**_CHECKS, **OF_PIXELS}.items():
            value = getattr(self, name)
            if value is not None or getattr(type(self), name) is not None:  # None is a default alone
                object.__setattr__(self, name, check(name, value))

    @classmethod
    def of(cls, options: Any, words: Mapping[str, Any]) -> Options:
        """Names win."""
        unknown = next((name for name in words if name not in OPTIONS), None)
        if unknown is not None:
            raise KeywordError(f"{unknown}: got an unknown option, expected one of {', '.join(OPTIONS)}")
        if options is None:
            return cls(**words)
        if not isinstance(options, Options):
            raise InputError(
                f"options: got {type(options).__name__}, expected an Options, such as Options(strength=0.8)"
            )
        return replace(options, **words)

    @property
    def pixels(self) -> dict[str, Any]:
        """The options of ``pixels`` alone."""
        return {name: getattr(self, name) for name in OF_PIXELS}

    def check(self, quality: str, dimension: int = 2) -> None:
        """Raise `InputError` for options that a quality does not have."""
        check_choice("quality", quality, QUALITIES)
        for name, value in self.pixels.items():
            if value is not None and dimension == 3:
                raise InputError(
                    f"{name}: got {value!r} for a volume or a clip, whose qualities are all flows of groups; leave it "
                    "out"
                )
            if value is not None and quality != "pixels":
                before = ", as 'fast' was called before" if quality == "fast" else ""
                raise InputError(
                    f"{name}: only quality='pixels' has it{before}, got quality={quality!r}; leave it out, or choose "
                    "pixels"
                )
        if quality == "pixels" and dimension == 3:
            raise InputError("quality: got 'pixels' for a volume or a clip, expected 'fast', 'balanced' or 'best', "
                             "which are flows of groups of blocks")  # fmt: skip
        if self.steps is not None and self.stopping is not None:
            raise InputError(f"steps: got {self.steps} together with stopping={self.stopping!r}; leave one of them out")

    def refuse(self, names: Iterable[str], what: str) -> None:
        """Raise `InputError` for options of these names that are not the default."""
        for name in names:
            if (value := getattr(self, name)) != OPTIONS[name]:
                raise InputError(f"{name}: got {value!r} for {what}, expected {OPTIONS[name]!r}; leave it out, or use "
                                 "nlflow.denoise")  # fmt: skip


OPTIONS: Final[dict[str, Any]] = {one.name: one.default for one in fields(Options)}
"""Their names and defaults."""
