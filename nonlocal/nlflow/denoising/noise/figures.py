"""Figures and their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

T = TypeVar("T")

BY_HAND = "chosen by hand"
COST = "a bound of time or memory, chosen by hand"
ON_PHOTOGRAPHS = "chosen on BSD68 and Kodak photographs, Set12 not looked at"
BY_LAWS = "measured: python -m benchmarks.finding"
ON_STACKS = "chosen on a brain template and two clips"
ON_FLAT_PARTS = "measured on simulated noise and 50 photographs of PolyU: docs/decisions/flat-parts.md"
BY_SWEEP = "measured: counts of 0.05 to 3 a sample in cells, a photograph and coins"
OF_FLOATS = "derived: squares stay in the range of floats"
OF_ROUNDING = "derived: rounding"
OF_LAW = "derived: a quantile of the law"

TO_SIGMA = 1.4826022185056018  # of the median of absolute values of a normal variable
QUARTILES = 2 / TO_SIGMA  # between those of one
MEDIAN_SQUARE = 0.4549364231195724  # of one: TO_SIGMA**-2


@dataclass(frozen=True)
class Figure:
    """A number, or several."""

    value: Any  # a dict by the number of axes, or by case, where it depends on that
    meaning: str
    source: str  # how it was chosen, measured or derived


def figure(value: T, meaning: str, source: str = "") -> T:
    """Return an entry of a table; the class that holds it shows the value alone."""
    return cast(T, Figure(value, meaning, source))


class Figures:
    """Figures of one subject."""

    table: ClassVar[Mapping[str, Figure]]

    def __init_subclass__(cls, source: str) -> None:
        """Move the entries into the table, and leave their values."""
        entries = {name: one for name, one in vars(cls).items() if isinstance(one, Figure)}
        cls.table = MappingProxyType({name: replace(one, source=one.source or source) for name, one in entries.items()})
        for name, one in entries.items():
            setattr(cls, name, one.value)


class OfSpectra(Figures, source=BY_HAND):
    """Gaussian noise."""

    smoothing = figure(1.5, "samples over which the intensity is smoothed that the noise follows")
    rounding = figure(1e-12, "by which the mean of a spectrum that was divided by it may differ from 1", OF_ROUNDING)
    finer = figure(8, "intensities for each given one, where the sum is no straight line between them")
    largest = figure(1e150, "standard deviation whose square is a number", OF_FLOATS)
    frequencies = figure(64, "frequencies along an axis; finer spectra are averaged over cells of this grid")
    taken = figure(0.25, "of the highest frequency of a coarse image, up to which it is taken over as it is")
    left = figure(0.1, "of the noise at low frequencies, that the flow of a coarser image leaves")
    least = figure(24, "samples along an axis that is halved for a coarser image, at least")


class OfCounts(Figures, source="chosen by hand, so that the table is exact to 1e-5 counts"):
    """Transform of counts."""

    table_end = figure(300.0, "counts; the series after it is exact to 1e-7 of them")
    table_step = figure(0.03, "in the stabilized value, which has noise of strength 1")
    tail = figure(12.0, "standard deviations within which a law is summed")
    nodes = figure(64, "of the quadrature over the Gaussian")
    places = figure(33, "intensities of noise in place of counts", BY_HAND)
    least = figure(0.3, "counts: a standard deviation that even darkness has", BY_HAND)
    most = figure(9e18, "counts that NumPy draws, at most: those of 64 bits", OF_FLOATS)
    few = figure(2.0, "counts a sample on average: with fewer, the transform does not make noise even", BY_SWEEP)
    at_first = figure(4.0, "counts in a cell that the flow begins with", BY_SWEEP)
    at_last = figure(2.0, "the same for what it ends with, where estimates count as counts", BY_SWEEP)
    rounds = figure(4, "flows from large cells to small ones, one for each halving at least", BY_SWEEP)
    fresh = figure(0.35, "weight of the samples in the last of them, beside the estimate", BY_SWEEP)
    expected = figure(4096, "places of the table of expected transforms", COST)
    levels = figure(12, "of intensity at which moments are measured", COST)
    in_level = figure(120, "blocks of a level, at least", BY_HAND)
    quiet = figure(0.4, "of them, those whose opposite neighbours are most alike, are measured", BY_HAND)
    values = figure(2**14, "samples whose values show a step, and values of whole counts", COST)
    white = figure((0.75, 1.35), "power of middle frequencies over that of the highest: 1 for white noise", BY_HAND)
    alike = figure(0.05, "relative: so far variances may be from those of whole counts", BY_HAND)
    uneven = figure(0.5, "relative error of a variance, and of the third cumulant, at most", BY_HAND)
    whole = figure(1e-6, "of a step: what is nearer to a multiple of it is one", OF_ROUNDING)
    off = figure(2.0, "errors that most variances are at most from the law; chance alone makes 0.7", BY_HAND)
    pulses = figure((0.8, 1.8), "third cumulant over gain and variance: 1 for counts, 1.5 after a random gain", BY_HAND)


class OfLaw(Figures, source="chosen by hand, so that the table is exact to 1e-6 of the noise"):
    """Transform of magnitudes."""

    span = figure(6.0, "beyond the least typical magnitude: from there on the function has its asymptotic form")
    below = figure(5.0, "under the least typical magnitude: smaller ones hardly occur")
    free = figure(16, "slopes that are chosen")
    smooth = figure(
        1.0,
        "weight of the second differences of log slopes: less makes outliers near 0",
        "measured: a brain template loses 0.1 to 0.3 dB with 0.1",
    )
    means = figure(80, "noise-free magnitudes at which the spread is looked at")
    digits = figure(2.0**-12, "of log slopes: what is lost is less than the spread differs from 1", OF_ROUNDING)
    knots = figure(96, "of the function")
    nodes = figure(8, "of the quadrature, between two knots")
    tail = figure(9.0, "standard deviations within which the law is summed")
    step = figure(0.05, "of the table of means")
    last = figure(20.0, "so far the table goes beyond `span`; the series after it is exact to 1e-7")
    large = figure(1e6, "from which on all that is added to a magnitude is rounding")


class OfMagnitudes(Figures, source=BY_HAND):
    """Strength of magnitudes."""

    most_coils = figure(256.0, "coils, at most")
    agreed = figure(1e-3, "relative: a strength that changes by less is found")
    rounds = figure(15, "of the search for a fixed point")
    above = figure(1.7, "times the mean of pure noise, for the spread of the samples: what is darker tells little")
    alike = figure(0.08, "relative: so far a local mean of pure noise is from the mean")
    few = figure(0.005, "of the samples: fewer are no background")
    same_ratio = figure(0.06, "relative: so far the ratio of mean and spread of a background is from that of the law")
    law = figure(0.3, "distance of a background to Rayleigh's law over that to a Gaussian one, at most", BY_LAWS)
    first = figure(0.15, "relative: so far their ratio of mean and spread is from that of the law, at most")
    local = figure({1: 129, 2: 17, 3: 9}, "samples along an axis over which means are taken")
    coils = figure((1, 2, 3, 4, 6, 8, 12, 16), "that are tried where variances grow with the mean")
    strengths = figure((0.95, 1.2, 101), "from, of the least spread in a stack, to, of the largest, and how many")
    far = figure(40.0, "the largest magnitude without noise whose spread is tabulated; it is 1 to 1 % from there on")
    below = figure(0.3, "so far below the least mean of the law that of a bin may be by chance")
    nearer = figure(0.5, "distance of variances to the law over that to a line, where the law is far nearer", BY_LAWS)


class OfSpeckle(Figures, source=ON_PHOTOGRAPHS):
    """Speckle."""

    power = figure(1 / 3, "makes a gamma law nearly Gaussian", "Wilson and Hilferty 1931 (doi 10.1073/pnas.17.12.684)")
    width = figure({1: 4.0, 2: 1.5, 3: 1.0}, "of the Gaussian that says what the intensity is about, in samples")
    dark = figure(1e-4, "of the mean intensity: what is darker counts as this dark")
    many = figure(1e4, "looks from which on moments follow from their series", BY_HAND)
    looks = figure((0.2, 1e6), "looked for")
    most_looks = figure(300.0, "by evenness alone: more are not told from the grain of photographs")
    side = figure({1: 64, 2: 16}, "of the windows in which noise is measured")
    coarse = figure(4, "samples along a side of the means by which flat windows are chosen")
    flat = figure(0.2, "of the windows: those count as flat")
    most_windows = figure(1024, "windows", COST)
    slices = figure(8, "slices", COST)
    least_windows = figure(60, "windows that tell something")
    at_end = figure(0.02, "of the samples of a window, that may be at an end of the range")
    lowest = figure(2.0, "periods in a window, of which fewer are structure", BY_HAND)
    quantiles = figure(256, "at which laws are compared", BY_HAND)
    law = figure(0.25, "distance to the law over that to a Gaussian one, at most", BY_LAWS)
    skewed = figure(-0.45, "skewness of logarithms, at most: that of 5 looks", BY_LAWS)
    alike = figure(1.15, "times the noise of the quieter half of the windows is that of the other, at most", BY_LAWS)
    amplitudes = figure(1.5, "looks of amplitudes, at most: more are not told from counts", BY_LAWS)
    rounded = figure(0.2, "of the least intensity that is not 0: what 0 counts as", BY_HAND)
    bins = figure(6, "of intensity")
    counted = figure(10.0, "times the least intensity that is not 0: darker windows may hold counts", BY_HAND)
    dim = figure(0.02, "of the mean: darker windows are left out, where samples are whole numbers")
    range = figure(1.7, "of intensities, at least, where evenness tells")
    slope = figure(0.25, "of log noise over log intensity: 0 for speckle, -1/2 for counts, -1 for white noise")
    even = figure(1.35, "times the least noise of a bin is the most, at most")
    white = figure(1.2, "times as much as at high frequencies is there at middle ones, at most")


class OfImpulses(Figures, source=ON_PHOTOGRAPHS):
    """Impulses."""

    reach = figure({1: 6, 2: 2, 3: 1}, "half side of the neighbourhood that a sample is compared with")
    out = figure(3.0, "standard deviations of its neighbours at which a value sticks out of them")
    spike = figure(4.0, "the same where any value may be an impulse, or a spike")
    least_neighbours = figure(0.25, "of a neighbourhood that must be no candidates themselves, to compare with")
    unsure = figure(6.0, "neighbours: with as few, their spread counts twice")
    least_spread = figure(0.01, "of the range: neighbours are not taken to be more alike than this")
    area = figure(1e-5, "probability of so many equal neighbours among impulses, below which they are an area")
    ways = figure({1: 1.0, 2: 6.0, 3: 18.0}, "in which a piece of samples goes on")
    least_piece = figure(4, "samples that impulses alone may join")
    blocks = figure(6, "along each axis: impulses are found in all of them")
    least_count = figure(12, "impulses to believe in any")
    least_visible = figure(0.05, "of the samples: where a value would stick out, so that there is something to count")
    atom = figure(4.0, "times as many samples stick out with the value itself as with values between it and the others")
    even = figure(0.5, "of the mean density that most blocks reach")
    most_blocks = figure(0.8, "of the blocks, that reach it")
    per_block = figure(8.0, "impulses expected in a block")
    least_step = figure(0.1, "of the range: what is nearer to its neighbours does not stick out")
    steps = figure(3.0, "the same, in steps of integers: nearer ones have no values between them that would be rare")
    most_drawn = figure(0.1, "density with which samples of a lattice still are apart")
    clustered = figure(2.0, "times the odds of equal neighbours that samples have which are strewn")
    most = figure(0.99, "density, at most")
    piece = figure(2**16, "samples whose neighbours are sorted at a time", COST)
    looked = figure(2**15, "samples among which the most common value is looked for", COST)
    few = figure(2**12, "samples of a value that are looked at first", COST)


class OfHot(Figures, source=ON_STACKS):
    """Hot pixels."""

    least_frames = figure(4, "frames whose median tells what is fixed")
    least_share = figure(2e-5, "of the samples: sensors have more, laws with long tails fewer")
    most_share = figure(0.02, "of the samples: with more they are no single ones")


class OfLooks(Figures, source=COST):
    """Bands of rows."""

    most = figure(2**17, "samples that are looked at first")
    band = figure(64, "rows of them side by side")


class OfSharpness(
    Figures, source="chosen on BSD68 and Kodak photographs, letters, screens and stars; Set12 looked at once"
):
    """Sharp samples."""

    filled = figure(5, "samples along an axis whose mean stands for a missing one", BY_HAND)
    sampled = figure(3000, "samples whose noise is looked at", COST)
    least_sampled = figure(200, "of them that tell a quantile", BY_HAND)
    tail = figure((0.2, 0.05), "shares of the samples that are bent most, from which their tail is told")
    chance = figure(0.1, "samples of the picture that noise takes so far")
    sharp = figure((0.8, 1.15), "of its height is a sample above both neighbours; a line behind optics 0.54 at most")
    roughly = figure((0.7, 1.4), "the same by four samples around, for a first choice", COST)
    alone = figure(0.35, "of its height that no neighbour reaches; 0.46 behind optics of 0.8 pixels")
    soft = figure(0.68, "of a step in its middle third, for nine steps of ten: 0.5 behind such optics, and noise")
    least_steps = figure(20, "steps that tell how sharp a picture is")
    least = figure(5, "outliers in a soft picture to believe in any")
    least_alone = figure(8, "the same in a sharp one")
    beyond = figure(2.0, "times as far as noise reaches are most of them: a tail ends there")
    tiles = figure(4, "along each axis, over which outliers are strewn")
    strewn = figure(0.7, "of the tiles that chance hits, and of the outliers that are alone, at least")
    strewn_softly = figure(0.5, "of the tiles, at least, in a soft picture")
    lattice = figure(24, "places that tell that they are even")
    by_chance = figure(0.4, "off a half, in which of two outliers that are strewn one has another near")
    track = figure(16, "samples that hang together, of a cosmic ray; longer ones are lines")


class OfStripes(Figures, source=ON_PHOTOGRAPHS):
    """Stripes."""

    lags = figure(2, "rows are compared with the next two")
    width = figure(0.5, "of the weights, in robust standard deviations of the differences of two rows")
    reweightings = figure(8, "of the samples of two rows")
    dependent = figure(30.0, "samples of a row that tell as much as an independent one: edges are long")
    degrees = figure(3.0, "of freedom of Student's law of the errors of the differences")
    least_spread = figure(0.05, "of sigma: the differences of two rows are not taken to be more certain")
    parts = figure(6, "of a row, that must agree")
    agreed = figure(0.6, "times their distance from one another: a step this large is agreed on")
    alone = figure(0.4, "the same of noise alone, in the middle", "measured: white noise of 24 to 256 rows")
    by_chance = figure(
        1.8,
        "over the root of the number of rows: by more noise alone goes beyond its middle in 1 of 200 pictures",
        "measured: white noise of 24 to 128 rows",
    )
    opposite = figure(-0.2, "correlation of steps that follow each other")
    unrelated = figure(0.35, "correlation of others")
    least_ratio = figure(0.15, "of the quartiles of the sizes of steps: 0.28 for a Gaussian law")
    most_ratio = figure(5.0, "of their last decile and their median: 2.4 for a Gaussian law; a few may be edges")
    least_rows = figure(24, "rows, and columns, to tell")
    same = figure(0.8, "correlation of the steps of channels that have the same offsets")
    beneath = figure(
        0.2,
        "of the offsets' standard deviation has what lies beneath, about means of rows and columns, where there is no "
        "other noise: 0.03 in a grating, 0.4 to 50 in BSD68 under offsets of 3 to 40 of 255",
    )
    bounded = figure(4.0, "errors of the kurtosis of their law below 3, at most: a grating has 5 of 256 rows", OF_LAW)
    line = figure(0.3, "of the power in a line of the spectrum, from which on it stands for stripes", BY_HAND)
    beside = figure(0.2, "of the line, that the lines beside it have at most", BY_HAND)
    weak = figure(0.01, "of the noise: what is left beside stripes counts as none", BY_HAND)


class OfHum(Figures, source=BY_HAND):
    """Hum."""

    order = figure(16, "of the filter that predicts the recording, at most")
    rounds = figure(6, "of filter and fit in turn", "measured: figures do not change after four")
    parts = figure(8, "parts of the recording in which a line has the same amplitude and phase")
    cycles = figure(4, "of a line in one part, at least")
    near = figure(4, "steps of the spectrum that a line fills")
    background = figure(65, "steps whose median a line is compared with")
    most_lines = figure(24, "lines that are looked at")
    tones = figure(6, "lines that a signal of tones is made of: more of them are those of beats")
    clipped = figure(3.0, "standard deviations: outliers, such as heart beats, are cut off there")
    harmonic = figure(0.5, "steps of the spectrum by which a line may miss a multiple")
    most_harmonics = figure(20, "multiples of the mains")
    missing_harmonics = figure(3, "the lowest line is this multiple of the mains at most")
    share = figure(0.25, "of the energy of the signal's own structure, at most, for a line that is nowhere near mains")
    share_mains = figure(100.0, "the same for a line that is where mains are")
    structure = figure(0.5, "of the energy of the noise: with less structure there is no signal to lie on")
    below = figure(8.0, "structure is measured from this part of the lowest frequency on: trends are no other content")
    quiet = figure(2, "cycles of a window: in half of all windows hum has at least half of its amplitude, beats do not")
    growth = figure(0.5, "relative change of the amplitude from the middle to an end")
    mains = figure((50.0, 60.0), "Hz", "standard of power grids")
    mains_error = figure(0.01, "relative; clocks and mains together are better than that")
    rates = figure(
        (
            *(100, 128, 250, 256, 360, 400, 500, 512, 1000, 1024, 2000, 2048),
            *(8000, 11025, 16000, 22050, 32000, 44100, 48000),
        ),
        "samples a second that are usual: lines where they have mains are mains; not 200, for a year has 4 quarters",
    )
    rates_error = figure(0.002, "relative, for them: a line at random is as near in 1 of 30 cases")


class OfDrift(Figures, source=BY_HAND):
    """Drift."""

    least_scale = figure(8.0, "samples: anything faster is no drift")
    cells = figure(64, "that a length of `scale` is cut into, at most: the drift is all but linear in each", COST)
    straight = figure(16.0, "times the length of the recording: a scale from which on the baseline is a straight line")
    settled = figure(1e-4, "of the spread of the rest: a change of the baseline that ends the rounds")


class OfRecordings(Figures, source=BY_HAND):
    """Spectra of recordings."""

    false = figure(1e-3, "chance that a recording of white noise has a line or a spike")
    disagree = figure(2.0, "ratio of two estimates of the same noise from which on they disagree")
    side = figure(32, "samples of a window")
    long = figure(4096, "samples of a recording from which on windows are twice as long")
    overlap = figure(8, "windows in which a sample lies")
    most_windows = figure(2**15, "windows that are looked at", COST)
    cut = figure(0.25, "of the samples of a window may be at an end of the range where noise was cut off")
    least = figure(256, "samples: fewer windows do not tell noise from structure, and lines are not narrow")
    shares = figure((1 / 8, 1 / 4, 1 / 2, 1.0), "of the windows, those of least energy first")
    least_windows = figure(6, "independent ones")
    rounds = figure(5, "of choosing windows and measuring")
    reach = figure(2, "steps of the spectrum that a tapered window mixes")
    slow = figure(2, "steps: below, structure cannot be told from noise, and the spectrum is continued")
    continued = figure((5, 8), "steps up to which its slopes are taken")
    steepest = figure(3.0, "power of the frequency by which noise grows towards 0, at most")
    hump = figure(0.5, "of the frequencies: a hump that is narrower is a tone of the signal")
    outlier = figure(3.0, "errors by which a hump stands out, and twice the power, as a steep spectrum is no line")
    neighbours = figure(3, "steps to each side over which the logarithm is smoothed")
    white = figure(3.5, "errors of the smoothed logarithm within which a spectrum is flat")
    certain = figure(0.8, "of the variance, beyond which noise is told from the signal")
    rising = figure(0.35, "of the variance at low frequencies, beyond that beside them: more may be slow structure")
    sure = figure(0.5, "of the variance: with less that is distributed as noise, what was found is the signal")
    flat = figure(0.2, "the same in absolute terms: 0.9 dB do not matter")
    agree = figure(0.15, "relative: so far their strengths may be apart from that of the quietest parts")
    slower = figure(1.3, "times the strength at high frequencies is that of means of two samples, where noise is white")
    harmless = figure(1e-4, "of the range: taking out so little harms nothing: 80 dB")
    huber = figure(1.345, "standard deviations: 95 % efficient", "Huber 1964 (doi 10.1214/aoms/1177703732)")


class OfSpikes(Figures, source=BY_HAND):
    """Spikes."""

    beside = figure(5, "samples on each side of a run, over which a recording is a parabola, or more is seen")
    longest = figure(5, "samples of a spike")
    noise = figure(0.01, "chance that noise leaves more beside the parabola, from which on it is structure")
    lines = figure((2.0, 2.5, 3.0, 4.0, 6.0), "samples, of lines at half height: sampling asks for two")
    narrow = figure((1.2, 1.4, 1.6, 1.8), "of lines of an instrument that samples too rarely")
    apart = figure(0.03, "of the energy of a spike, that lines leave: shapes between those on the list leave less")
    near = figure(64, "samples over which the noise is measured")
    proved = figure(0.1, "of the spikes are narrower than any line: a third are one sample wide where all widths occur")
    few = figure(4, "spikes tell whether they are alike")
    alike = figure(0.15, "relative spread of heights or intervals: exponential ones have 1, beats 0.1")
    nothing = figure(1e-7, "of the range: less is rounding of single precision", OF_ROUNDING)
    unusual = figure(0.05, "of the values of a recording that repeats each are repeated less often than all others")


class OfDispersion(Figures, source=BY_HAND):
    """Counts of recordings."""

    whole = figure(1e-3, "steps: so far samples are from multiples, beside what their precision rounds")
    most = figure(1e6, "counts: of more single precision has no steps", OF_ROUNDING)
    least = figure(50, "pairs of counts, of more than one together")
    parts = figure(3, "from few to many counts, each of which must have the law")
    structure = figure(0.15, "by which structure raises the variance")


class OfFiles(Figures, source=BY_HAND):
    """Models in files."""

    most_bytes = figure(2**24, "a model of three channels takes less than half a megabyte", COST)
    deepest = figure(4, "models within models: a sum holds parts, which may be sums", COST)


class OfWindows(
    Figures, source="chosen on BSD68 and Kodak photographs and on PyWavelets' demo signals, Set12 not looked at"
):
    """Estimate of sigma."""

    sides = figure(
        {1: (16, 8, 4, 2), 2: (8, 4, 2), 3: (4, 2)}, "of the windows; smaller ones where too few of the first fit"
    )
    high = figure(
        {1: 9 / 15, 2: 11 / 14, 3: 0.7}, "of the highest frequency: noise is measured from here on, structure below"
    )
    first = figure(
        {1: 0.5, 2: 0.01, 3: 0.01}, "of the windows: those with the least structure, from which the search starts"
    )
    repeated = figure(
        0.25, "of samples like the next one, at most, in what has noise: 0.28 of integers with noise of 1", OF_LAW
    )
    filled = figure({1: 9, 2: 5}, "a neighbourhood so wide that is constant was filled in, and has no noise")
    most_windows = figure({1: 2**16, 2: 2**16, 3: 2**17}, "windows that are looked at", COST)
    quantiles = figure((0.25, 0.5, 0.7), "of the sizes of errors of white noise, below those of structure", BY_HAND)
    apart = figure(1.25, "ratio of the strengths of channels from which on they have one each")
    block = figure({2: 2**12, 3: 2**14}, "windows that are transformed at a time: they stay in the cache", COST)
    rounding = figure(1e-14, "of the range: a smaller strength is none", OF_ROUNDING)
    first_error = figure(0.09, "relative uncertainty of sigma that the first windows must reach", BY_HAND)
    last_error = figure(
        0.01, "relative uncertainty from which on more windows are not worth the structure in them", BY_HAND
    )
    clipped = figure(0.001, "of the samples at one end of the range, from which on it was clipped there", BY_HAND)
    clipped_margin = figure(
        2.0, "in sigma: windows whose mean is nearer to the limit are left out", "derived: at most 3 % of sigma is lost"
    )
    repeats = figure(0.65, "windows one sample apart that count as one independent one, per sample of one", BY_HAND)


class OfTransfer(Figures, source=BY_HAND):
    """Photon transfer."""

    bins = figure(40, "of the mean, at most")
    least_bins = figure(4, "bins that make a line")
    in_bin = figure(60, "blocks in a bin, at least")
    share = figure(0.1, "of the blocks of a bin: those with the least structure, from which more are taken")
    sure = figure(0.02, "relative uncertainty of a variance from which on more blocks are not worth their structure")
    sweeps = figure(20, "of reweighting")
    outlier = figure(2.5, "standard errors: variances farther above the line count as structure")
    significant = figure(4.0, "standard errors that tell a number from 0, or from what a law says")
    off = figure(0.2, "root mean square of relative distances from the line, from which on it is none")
    cut = figure(3.0, "standard deviations above the lower end, where nothing is cut off")
    consistent = figure(2.0, "standard errors: slopes with and without the darkest parts differ by less")
    darkest = figure(0.01, "of the blocks")


class OfFlat(Figures, source=ON_FLAT_PARTS):
    """Flat parts."""

    block = figure(8, "samples along the side of a block, in the picture of half the size")
    step = figure(4, "samples from one block to the next")
    of_blocks = figure((2, 5), "cosine frequencies of a block along its axes, the greater of both")
    smallest = figure(32, "samples along the sides of the part")
    excess = figure(
        2.0, "mean power of its blocks over their median, at most: it is 1.1 for noise, 1.9 after compression"
    )
    smooth = figure(0.88, "correlation of neighbours, at most: that of white noise blurred by 1.4 px")
    coarser = figure(
        (0.6, 0.4),
        "the same at half and a quarter of the size, at most, and a standard error: 0.6 and 0.23 by that blur, 0.62 "
        "and 0.38 in 98 of 100 flat parts of PolyU, more in most other parts of photographs",
    )
    near = figure(8, "lags up to which correlations count as those of noise")
    far = figure((12, 5.5), "lags from which on correlations are at most so many standard errors: 4 for noise")
    skew = figure(0.9, "at half the size, at most: 0.6 for a Rayleigh law, 1 to 2 for print")
    quantiles = figure((0.1, 0.8), "of the variances of 3 x 3 samples, whose ratio says how even it is")
    uneven = figure(
        (0.1, 2.1),
        "logarithm of that ratio over that of noise, and its error times the root of the number of samples: 0 for "
        "noise, 0.4 to 1.4 for grass beyond thrice the noise, 0.1 to 8 after compression",
    )
    beyond = figure(2.0, "spread of its samples about a surface over the noise that was found, at most")
    nothing = figure(1e-9, "of the range: less is rounding", OF_ROUNDING)
    at_end = figure(0.25, "of its samples: so many are at an end where noise was clipped or rounded")


class OfPlaces(Figures, source=BY_LAWS):
    """Maps of noise."""

    parts = figure(9, "along each axis of a picture, in each of which noise is measured", BY_HAND)
    in_slice = figure(6, "windows side by side along each axis of a slice, each of which is a part, at least", BY_HAND)
    windows = figure(90, "along each axis of a picture", COST)
    side = figure(8, "samples of a window", BY_HAND)
    middle = figure((4, 5), "frequencies at which noise is measured; lower ones say where it is flat", BY_HAND)
    high = figure((6, 7), "and the highest ones", BY_HAND)
    constant = figure(
        0.5, "of the samples of a window that are like their neighbours to the last bit, at most", BY_HAND
    )
    flat = figure(0.3, "of the windows of a part: those count as flat", BY_HAND)
    least = figure(12, "flat windows of a part", BY_HAND)
    repeats = figure(4.0, "coefficients of overlapping windows that tell as much as an independent one", BY_HAND)
    least_parts = figure(12, "parts with noise", BY_HAND)
    degrees = figure((2, 4), "of the surface, in turn", BY_HAND)
    by_light = figure(4, "coefficients of a strength by intensity", BY_HAND)
    white = figure(0.9, "noise at the highest frequencies over that at the next lower ones, at least")
    met = figure(4.0, "mean square of the distance to the surface, in errors, at most")
    better = figure(5.0, "times this distance is that to one strength, and to one by intensity, at least")
    differ = figure(1.25, "times the least noise is the most, at least: less costs less than 0.1 dB")
    uneven = figure(1.25, "times what the intensity tells, as a root mean square, from which on noise is uneven")


class OfStacks(Figures, source=BY_HAND):
    """Volumes and clips."""

    varying = figure(2.0, "ratio of variances from which on noise counts as following the light")
    flat = figure(0.05, "of the blocks: those with the least structure")
    low = figure(5, "sum of the frequencies of three axes: those below it say where blocks are flat")
    falling = figure(0.75, "power at the highest frequency of an axis over that at the second, below which noise falls")
    most = figure(3.0, "times the strength at high frequencies")
    structure = figure(1.2, "times the strength at high frequencies is that of a coarser volume, without structure")
    doubtful = figure(2.0, "the same, from which on it may be noise of which compression left the lower frequencies")


class OfVerdict(Figures, source=BY_HAND):
    """The verdict."""

    least_range = figure(1e-100, "with smaller and larger ranges nothing but a strength is estimated", OF_FLOATS)
    slab = figure(8, "slices that are looked at together", COST)
    most = figure(2**21, "samples in them", COST)
    errors = figure(2.0, "of what most differences along diagonals tell, by which it is less than quiet blocks tell")
    less = figure(
        0.22, "relative: the same, at least", "measured: white noise of 16 to 40 samples a side: 1 of 50 pictures"
    )
    fewest = figure(
        32,
        "differences along diagonals, with fewer of which nothing is sure",
        "measured: 64 samples of white noise are 20 % off in 1 of 3 pictures",
    )
    rounds = figure(20, "of leaving out what is far larger than the noise", COST)
    slower = figure(
        1.8,
        "times as much noise at half the size, at most, where it is white",
        "measured: white noise on photographs of 12 to 40 samples a side has 1.7 at most, blurred noise 2.2 at least",
    )
    smallest = figure(16, "samples along the sides of a picture of which more than a strength is told")


class OfBelief(
    Figures, source="chosen on BSD68 and Kodak photographs with simulated noise and on 1388 drawings; Set12 looked at"
):
    """Strong noise beside what was learned: bands are numbered from the highest frequencies down."""

    strong = figure(0.025, "of the range: heavy tails in quiet parts do not speak against noise that is so strong")
    told = figure(2, "the band down to which the spectrum of strong noise is told from that of structure")
    steepest = figure(
        1.0, "power of the frequency by which noise falls down to there, where its slope tells how it goes on"
    )
    sloped = figure(
        0.18, "the same, beyond which it is not white: 0.1 for white noise on photographs, 0.5 for 1/f noise"
    )
    filtered = figure((3, 4, 5), "bands in which noise that was filtered is much stronger than two bands higher")
    falling = figure(3.5, "times as strong it is there: white and 1/f noise on photographs is 2.7 times at most")
    wide = figure(8.0, "ratio of the limits of its strength, beyond which next to nothing is known of it")
    white = figure(0.35, "probability of white noise, which no filter made, at most")


class OfEnlarged(Figures, source=BY_HAND):
    """Enlarged pictures."""

    most = figure(1024, "samples along each axis that are looked at", COST)
    largest = figure(16, "samples along a side of a cell")
    least = figure(8, "cells along an axis")
    cells = figure(64, "that are not cut off at an end of the range")
    border = figure(
        1.5, "times the mean square step between neighbours within cells is that from cell to cell, at least"
    )
    alike = figure(1.25, "ratio of steps at two places within cells, at most")
    quantiles = figure((0.25, 0.5, 0.9), "of the variances within cells, which have the law of noise")
    law = figure(1.25, "ratio of what they, and steps, tell of the noise, at most")


class OfMosaics(Figures, source=BY_HAND):
    """Mosaics of colours."""

    block = figure(4, "samples of each place along a side of a block")
    ratio = figure(5.0, "of the variance between places to that within, from which on places differ")
    share = figure(
        0.15, "of the blocks in which they do: ten times that of photographs, half that of mosaics",
        "measured on Set12, BSD68 and Kodak24",
    )  # fmt: skip
    least = figure(16, "samples of each place along a side of the picture")
    side = figure(6, "of the blocks in which noise is measured")
    high = figure(1.3, "times the side: sums of two frequencies from there on hold hardly any structure")
    quiet = figure(0.02, "of the blocks of an intensity are looked at")
    bins = figure(12, "intensities")
    below = figure(0.1, "of the points may lie below the line")
    most = figure(2**20, "samples that are looked at", COST)
    growing = figure(1.5, "ratio of variances from which on a line counts")
