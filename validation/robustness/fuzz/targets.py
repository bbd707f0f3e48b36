"""The readers that are fuzzed: seeds, structure, words, and the modules whose branches are followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from validation.robustness.fuzz import files, folders, readers, records, seeds, words

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """A reader under fuzzing.

    Attributes
    ----------
    about : str
        What is read, for the table.
    make : callable
        From a folder to the reader.
    seeds : callable
        Returns valid inputs.
    structure : str
        A name in `robustness.fuzz.mutate.MUTATORS`.
    modules : tuple of str
        Modules of Python whose branches guide the fuzzer.
    words : tuple of str
        What a user might write.
    longest : int
        Bytes of an input.
    """

    about: str
    make: Callable[[Path], Callable[[bytes], object]]
    seeds: Callable[[], list[bytes]]
    structure: str = "bytes"
    modules: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    longest: int = 8192


_FILES = ("nlflow.desk.files", "nlflow.errors", "nlflow.desk.formats.media")
_PILLOW = ("nlflow.desk.formats.pictures", "PIL.Image", "PIL.ImageFile")
# Its module is so large that to follow all of it takes minutes.
_TIFFFILE = "tifffile.tifffile:TiffFile,TiffPages,TiffPage,TiffTag,TiffTags,TiffPageSeries,FileHandle"
_NUMPY = ("nlflow.store.npy", "numpy.lib._format_impl", "numpy.lib._npyio_impl")
_KERNELS = ("gaussian:width=", "laplace:width=", "tophat:radius=", "dot:scale=", "width=", "radius=", "scale=", "inf",
            "nan", "1e-320", "1e308", "-1", "0x10", "1_0", "٣")  # fmt: skip
_OPTIONS = ("nodes=", "dimension=", "boundary=", "channels=", "fidelity=", "metric=", "integrator=", "dt=", "laziness=",
            "seeds=", "eps=", "t=", "periodic", "reflect", "isolated", "l2", "degree", "euler", "semi-implicit",
            "runge-kutta", "4,8,16", "1,2")  # fmt: skip
_TOML = ("[options]", "[arrays.queries]", "[own]", "[program]", "[result]", "[[", "]]", "{}", "true", "1979-05-27",
         "1e400", "9" * 20, "nodes = ", "seeds = ", "kernel = ", "device = ", "out = ", "jobs = ", "rng = ", "\n", "''",
         '"""', "../x.npy")  # fmt: skip
_COMMANDS = (
    "denoise", "study", "attention", "info", "validate", "demo", "--version", "--help", "in.png", "in.npy", "out.png",
    "out.npy", "out.tif", "out.csv", "out", "*.png", "--quality", "fast", "balanced", "best", "--sigma", "--noise",
    "poisson", "gaussian", "--gain", "--read-noise", "--offset", "--mask", "nan", "--keep", "--reference", "--compare",
    "fig.png", "fig.pdf", "--stopping", "sure", "discrepancy", "--max-memory", "2GiB", "1e9", "--kind", "image",
    "signal", "--channel-axis", "-1", "--existing", "overwrite", "skip", "refuse", "--json", "--quiet", "time-order",
    "space-order", "monte-carlo", "mixing", "equilibrium", "stability", "--kernel", "--nodes", "--dimension",
    "--boundary", "--channels", "--fidelity", "--metric", "--integrator", "--dt", "--laziness", "--seeds", "--seed",
    "--queries", "--keys", "--values", "--device", "cpu", "auto", "cuda", "cpu-tensors", "--dtype", "float32", "--out",
    "--jobs", "--text", "--image", "--tokens", "--neutreno", "--no-spectra", "--list", "--width", "--patch-size",
    "--search-radius", "--set", "width=12", "stopping=sure", "--write", "quality=8", "--axes", "ZYX:5,1,1", "\n",
)  # fmt: skip

#: From the name of a reader to how it is fuzzed.
TARGETS: dict[str, Target] = {
    "png": Target("PNG images", readers.media(".png"), seeds.png, "png", (*_FILES, *_PILLOW, "PIL.PngImagePlugin")),
    "jpeg": Target(
        "JPEG images", readers.media(".jpg"), seeds.jpeg, "bytes",
        (*_FILES, *_PILLOW, "PIL.JpegImagePlugin", "PIL.MpoImagePlugin"),
    ),
    "tiff": Target(
        "TIFF images", readers.media(".tif"), seeds.tiff, "bytes",
        (*_FILES, *_PILLOW, "nlflow.desk.formats.tiff", "nlflow.desk.formats.tiff_pages", "nlflow.desk.formats.axes",
         _TIFFFILE),
    ),
    "nifti": Target("NIfTI volumes", readers.media(".nii"), seeds.nifti, "bytes",
                    (*_FILES, "nlflow.desk.formats.nifti", "nlflow.desk.formats.axes", "nibabel.nifti1")),
    "video": Target("films", readers.media(".mkv"), seeds.video, "bytes",
                    (*_FILES, "nlflow.desk.formats.film")),
    "npy": Target("NPY arrays and tokens", readers.npy, seeds.npy, "npy",
                  (*_FILES, *_NUMPY, "nlflow.desk.formats.tables", "nlflow.desk.terminal")),
    **{
        name: Target(f"{name.upper()} pictures", readers.media(f".{name}"), getattr(files, name), "bytes",
                     (*_FILES, *_PILLOW, f"PIL.{plugin}"))
        for name, plugin in (("bmp", "BmpImagePlugin"), ("gif", "GifImagePlugin"), ("webp", "WebPImagePlugin"),
                             ("avif", "AvifImagePlugin"))
    },
    "netpbm": Target("PNM images", readers.media(".pnm"), files.netpbm, "bytes", (*_FILES, "nlflow.desk.formats.pnm")),
    "au": Target("AU sound", readers.media(".au"), files.au, "bytes", (*_FILES, "nlflow.desk.formats.sound")),
    "npz": Target("NPZ archives", readers.media(".npz"), files.npz, "npz",
                  (*_FILES, *_NUMPY, "nlflow.desk.formats.containers", "zipfile")),
    "mat": Target("MAT files", readers.media(".mat"), files.mat, "bytes",
                  (*_FILES, "nlflow.desk.formats.mat", "nlflow.desk.formats.containers")),
    "hdf5": Target("HDF5 files", readers.media(".h5"), files.hdf5, "bytes",
                   (*_FILES, "nlflow.desk.formats.hdf5", "nlflow.desk.formats.containers"), (), 16384),
    "mat-name": Target("MAT files, an array by its name", readers.media(".mat", array="a"), files.mat, "bytes",
                       (*_FILES, "nlflow.desk.formats.mat", "nlflow.desk.formats.containers")),
    "mat73": Target("MAT files of version 7.3", readers.media(".mat", array="a"), files.matlab, "bytes",
                    (*_FILES, "nlflow.desk.formats.mat", "nlflow.desk.formats.hdf5"), (), 65536),
    "zarr": Target("zarr stores", folders.store, files.zarr, "model",
                   (*_FILES, "nlflow.desk.formats.ngff", "nlflow.desk.on_disk", "nlflow.desk.foreign"), (), 16384),
    "parquet": Target("Parquet tables", readers.media(".parquet"), files.parquet, "bytes",
                      (*_FILES, "nlflow.desk.formats.parquet", "nlflow.desk.formats.tables")),
    "raw": Target("camera raws", readers.media(".dng"), files.raw, "bytes", (*_FILES, "nlflow.desk.formats.pictures")),
    "wav": Target("WAV signals", readers.media(".wav"), seeds.wav, "bytes",
                  (*_FILES, "nlflow.desk.formats.sound", "scipy.io.wavfile")),
    "csv": Target("CSV tables", readers.media(".csv"), seeds.csv_tables, "bytes",
                  (*_FILES, "nlflow.desk.formats.tables"), ("nan", "inf", "-1e-9", "time (s)", '"', ";", "\t", "\r\n")),
    "companion": Target("masks, noise maps, references", readers.companion, seeds.companions, "companion",
                        # Not nlflow.desk.companions: atheris 3.0 never lets go of what it sees compared, arrays there.
                        (*_FILES, *_PILLOW, "nlflow.desk.formats.tables")),
    "archive": Target("archives and checkpoints", readers.archive, lambda: seeds.checkpoints() + seeds.archives(),
                      "npz",
                      (*_NUMPY, "nlflow.store.storage", "nlflow.store.encoding", "nlflow.flows.loop", "zipfile"),
                      (), 16384),
    "study": Target("folders of studies", folders.study, seeds.studies, "study",
                    ("nlflow.store.storage", "nlflow.store.records", "nlflow.store.encoding",
                     "nlflow.studies.contract", "nlflow.studies.runner", "nlflow.studies.mixing",
                     "nlflow.studies.fits", "nlflow.studies.result"),
                    (), 65536),
    "kernel": Target("kernels and options by name", words.kernel, seeds.kernels, "bytes",
                     ("nlflow.studies.options", "nlflow.studies.settings", "nlflow.kernels", "nlflow.errors"),
                     _KERNELS + _OPTIONS, 512),
    "recipe": Target("files that tell a study", words.recipe, seeds.recipes, "bytes",
                     ("nlflow.studies.replay", "nlflow.studies.options", "nlflow.studies.settings",
                      "nlflow.studies.runner", "nlflow.errors"), _KERNELS + _TOML, 4096),
    "command": Target("command lines", words.command, seeds.commands, "bytes",
                      ("nlflow.desk.commands.main", "nlflow.desk.commands.denoise",
                       "nlflow.desk.commands.denoise_folder", "nlflow.desk.commands.study",
                       "nlflow.desk.commands.attention", "nlflow.desk.commands.jobs",
                       "nlflow.desk.commands.denoise_file", "nlflow.denoising.frame", "nlflow.denoising.api",
                       "nlflow.studies.options", "nlflow.errors"), _COMMANDS, 1024),
    "model": Target("folders of transformers", folders.model, seeds.models, "model",
                    ("nlflow.attention.loading", "nlflow.attention.injection.inputs",
                     "nlflow.attention.injection.attach", "nlflow.attention.injection.blocks"), (), 65536),
    "layers": Target("layers of transformers, for the explorer", readers.layers, seeds.layers, "bytes",
                     ("nlflow.desk.explorer.layers_view",),
                     ("1e999", "null", "[]", "{}", "true", "-1", '"by_head"', '"rows"', '"J"', "9" * 20), 16384),
    "pictures": Target("zip data sets of trainings", readers.pictures, seeds.pictures, "npz",
                       ("validation.training.data", "zipfile", "PIL.Image", "PIL.ImageFile"), (), 16384),
    "state": Target("states of trainings", readers.state, seeds.states, "state",
                    ("validation.training.state",), (), 16384),
    "record": Target("records that later runs go by", records.record, records.records, "record",
                     ("nlflow.store.storage", "nlflow.store.records", "nlflow.store.encoding",
                      "nlflow.desk.commands.denoise_folder", "nlflow.desk.large",
                      "validation.finding", "validation.training.record", "validation.training.report"), (), 16384),
}  # fmt: skip
