"""Models and data of ``nonlocal attention --sweep`` and ``--report``."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = ("auto", "retrieval", "perplexity", "masked", "neighbours", "linear", "transcripts", "words")
_ENDINGS = (".txt", ".md")
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
_MOST = 10**8  # bytes of text, and of a picture
_HEADS = {"perplexity": "language", "masked": "masked", "transcripts": "speech", "words": "speech"}
_SURVEYED = 16  # inputs that a report looks into
_RATE = 16_000  # samples a second that models of speech take
_SECONDS = 30  # of a sound, ibid.


@dataclass(frozen=True)
class Measured:
    """A model, its task, and inputs to look into; `kind` is the name of one item."""

    network: Any
    task: Any
    inputs: list[Any]
    kind: str
    held: int


def measured(
    model: str, *, texts: Path | None, images: Path | None, sounds: Path | None, metric: str, items: int, words: int,
    size: int | None,
) -> Measured:  # fmt: skip
    from nlflow.attention import load_model
    from nlflow.errors import InputError, check_choice, check_integer

    check_choice("--metric", metric, METRICS)
    check_integer("--items", items, minimum=10, hint="intervals need some")
    check_integer("--words", words, minimum=1)
    wanted = _kind(model) if metric == "auto" else metric
    given = {"neighbours": images, "linear": images, "transcripts": sounds, "words": sounds}.get(wanted, texts)
    option = {"neighbours": "--images", "linear": "--images", "transcripts": "--sounds", "words": "--sounds"}.get(
        wanted, "--texts"
    )
    if given is None:
        raise InputError(f"{option}: got none for the metric {wanted} of {model}, expected a path; add {option} PATH")
    # Files are read before weights, which take longer.
    if wanted in ("neighbours", "linear"):
        found = _pictures(given, items)
        return _of_pictures(load_model(model), model, found, wanted, size)
    if wanted in ("transcripts", "words"):
        spoken = _spoken(given, items)
        return _of_sounds(load_model(model, head=_HEADS[wanted]), model, spoken, wanted)
    return _of_texts(load_model, model, wanted, texts_of(given), items, words)


def _kind(model: str) -> str:
    from nlflow.attention.injection.blocks import transformers_library
    from nlflow.errors import InputError, shortened

    try:
        config = transformers_library().AutoConfig.from_pretrained(
            model, local_files_only=Path(model).exists(), trust_remote_code=False
        )
    except Exception as error:  # the library fails in many ways
        raise InputError(
            f"model: got {model!r}, whose config.json cannot be read ({shortened(error, 300)}); expected a folder or "
            "the name of a model on the hub; check the name"
        ) from error
    names = " ".join(getattr(config, "architectures", None) or ())
    if hasattr(config, "num_mel_bins") and getattr(config, "is_encoder_decoder", False):
        return "transcripts"
    if hasattr(config, "patch_size") and not hasattr(config, "vocab_size"):
        return "neighbours"
    if "CausalLM" in names or "LMHead" in names:
        return "perplexity"
    return "masked" if "MaskedLM" in names else "retrieval"


def plan(found: Measured, settings: int, items: int, *, bounded: bool) -> Iterator[str]:
    if found.held < items:
        yield f"--items {items}: the data hold {found.held} {found.kind}, and all are taken; more data give more"
    most = "up to " if bounded else ""
    yield f"{most}{settings} settings and the model as it is, {found.held} {found.kind} each"


# ---- texts


def texts_of(place: Path) -> list[str]:
    from nlflow.errors import FileFormatError, MemoryLimitError, format_bytes

    files = [place]
    if place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
    if not files or not files[0].is_file():
        raise FileFormatError(
            f"--texts: got {place}, expected a file of text, or a folder with files {', '.join(_ENDINGS)}"
        )
    if (size := sum(path.stat().st_size for path in files)) > _MOST:
        raise MemoryLimitError(
            f"--texts: got {format_bytes(size)} in {place}, expected at most {format_bytes(_MOST)}; give a part of it"
        )
    found = []
    for path in files:
        try:
            found.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise FileFormatError(f"--texts: got {path}, which is no text in UTF-8; convert it") from error
    return found


def _of_texts(load: Any, model: str, wanted: str, read: list[str], items: int, words: int) -> Measured:
    from nlflow.attention import Perplexity, Retrieval, masked_tokens, neighbouring_passages
    from nlflow.attention.injection.everyday import padded
    from nlflow.attention.injection.inputs import positions, tokenizer_of
    from nlflow.errors import InputError

    tokenizer = tokenizer_of("--texts", model, "")
    if wanted == "masked":
        lines = [line for one in read for line in one.splitlines() if line.strip()]
        lines = [lines[i * len(lines) // items] for i in range(items)] if len(lines) > items else lines
        if len(lines) < 10:
            raise InputError(f"--texts: got {len(lines)} lines, expected at least 10: each is a sequence")
        network = load(model, head=_HEADS[wanted])
        task: Any = masked_tokens(tokenizer, lines, draws=2)
        sample = [padded(tokenizer, [line], positions(network)) for line in lines[:_SURVEYED]]
        return Measured(network, task, sample, "sequences", len(lines))
    if wanted == "perplexity":
        network, task = load(model, head=_HEADS[wanted]), Perplexity(tokenizer, read, blocks=items)
        sample = [{"input_ids": one[None]} for one in task.blocks[:_SURVEYED]]
        return Measured(network, task, sample, f"blocks of {task.blocks.shape[1]} tokens", len(task.blocks))
    pairs = neighbouring_passages(read, words=words, pairs=items)
    network, task = load(model), Retrieval(tokenizer, pairs)
    sample = [padded(tokenizer, [one], positions(network)) for one, _ in pairs[:_SURVEYED]]
    return Measured(network, task, sample, f"pairs of passages of {words} words", len(pairs))


# ---- pictures


def _pictures(place: Path, items: int) -> tuple[list[Any], list[str]]:
    """Return pictures and their classes, evenly from a folder or a ZIP with a folder for each class."""
    from nlflow.errors import FileFormatError

    if place.is_file() and zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive, tempfile.TemporaryDirectory(prefix="nlflow-") as folder:
            names = {one.filename: one for one in archive.infolist() if one.file_size <= _MOST and not one.is_dir()}
            chosen = _by_class(place, list(names), items)
            found = []
            for name in chosen:
                path = Path(folder, f"picture{Path(name).suffix}")
                path.write_bytes(archive.read(names[name]))
                found.append(_picture(path, name))
            return found, [_class(name) for name in chosen]
    if not place.is_dir():
        raise FileFormatError(f"--images: got {place}, expected a folder, or a ZIP, with a folder for each class")
    files = {str(path.relative_to(place).as_posix()): path for path in place.rglob("*") if path.is_file()}
    chosen = _by_class(place, list(files), items)
    return [_picture(files[name], name) for name in chosen], [_class(name) for name in chosen]


def _class(name: str) -> str:
    return name.rsplit("/", 2)[-2] if "/" in name else ""


def _by_class(place: Path, names: list[str], items: int) -> list[str]:
    """Return names of pictures, of each class alike many."""
    from nlflow.errors import FileFormatError

    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(_PICTURES):
            groups.setdefault(_class(name), []).append(name)
    if len(groups) < 2:
        raise FileFormatError(
            f"--images: got {len(groups)} folder(s) with pictures in {place}, expected at least two, one for each class"
        )
    each = -(-items // len(groups))
    return [own[i * len(own) // min(each, len(own))] for own in groups.values() for i in range(min(each, len(own)))]


def _picture(path: Path, name: str) -> Any:
    from nlflow.errors import FileFormatError

    try:
        pixels = picture_of(path)
    except ValueError as error:
        why = str(error).replace(str(path), name)
        raise FileFormatError(f"--images: got {name}, which cannot be read ({why}); leave it out") from error
    if pixels.dtype != "uint8":
        raise FileFormatError(f"--images: got {name} of {pixels.dtype} samples, expected 8 bits; convert it")
    return pixels


def picture_of(path: Path) -> Any:
    """Return the pixels of a picture as people see it."""
    from nlflow.desk.files import read
    from nlflow.desk.formats.media import upright

    media = read(path, kind="image")
    return upright(media.data, media.orientation)


def _of_pictures(network: Any, source: str, found: Any, wanted: str, size: int | None) -> Measured:
    import torch

    from nlflow.attention import Classification, image_inputs

    pictures, labels = found
    made = torch.cat([image_inputs(network, source, one, size=size)["pixel_values"] for one in pictures])
    pooling = "first" if wanted == "neighbours" else "mean"
    task = Classification(made, labels, classifier=wanted, pooling=pooling)
    step = max(1, len(made) // _SURVEYED)
    sample = [{"pixel_values": one[None]} for one in made[::step][:_SURVEYED]]
    return Measured(network, task, sample, "pictures", len(made))


# ---- speech


def _spoken(place: Path, items: int) -> list[tuple[Any, str]]:
    """Return sounds of 16 kHz with what is said in them: files NAME.wav with NAME.txt beside."""
    from nlflow.desk.files import read
    from nlflow.errors import FileFormatError

    found = []
    for path in sorted(place.glob("*.wav")) if place.is_dir() else []:
        said = path.with_suffix(".txt")
        if not said.is_file():
            raise FileFormatError(f"--sounds: got {path.name} without {said.name} beside it, which says what is said")
        found.append((_samples(read(path, kind="signal")), " ".join(said.read_text(encoding="utf-8").split())))
    if len(found) < 10:
        raise FileFormatError(
            f"--sounds: got {len(found)} sounds in {place}, expected a folder of at least 10 files NAME.wav, with what "
            "is said in NAME.txt"
        )
    return found[:items]


def _samples(media: Any) -> Any:
    """Return a sound as one channel of 16 kHz between -1 and 1."""
    import math

    import numpy as np
    from scipy.signal import resample_poly

    data = np.asarray(media.data)
    middle = 128.0 if data.dtype == np.uint8 else 0.0  # of 8 bits, which WAV files hold without a sign
    largest = np.iinfo(data.dtype).max - middle if data.dtype.kind in "iu" else 1.0
    sound = (np.asarray(data, dtype=np.float64) - middle) / largest
    sound = sound.mean(axis=-1) if sound.ndim > 1 else sound
    rate = int(media.sample_rate or _RATE)
    common = math.gcd(rate, _RATE)
    return resample_poly(sound, _RATE // common, rate // common)[: _SECONDS * _RATE].astype(np.float32)


def _of_sounds(network: Any, model: str, spoken: list[tuple[Any, str]], wanted: str) -> Measured:
    import torch

    from nlflow.attention import TokenAccuracy, WordErrors
    from nlflow.attention.injection.blocks import transformers_library

    library = transformers_library()
    extract = library.WhisperFeatureExtractor(feature_size=network.config.num_mel_bins)
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_file=str(Path(model) / "tokenizer.json"))
    begin = [network.config.decoder_start_token_id, *_no_times(tokenizer)]
    inputs, labels = [], []
    for sound, said in spoken:
        features = extract(sound, sampling_rate=_RATE, return_tensors="pt")["input_features"]
        ids = tokenizer(f" {said}", add_special_tokens=False)["input_ids"]
        inputs.append({"input_features": features, "decoder_input_ids": torch.tensor([[*begin, *ids]])})
        labels.append(torch.tensor([[-100] * (len(begin) - 1) + [*ids, network.config.eos_token_id]]))
    task: Any = TokenAccuracy(inputs, labels, name="agreement of tokens with what is said")
    if wanted == "words":
        heard = [one["input_features"] for one in inputs]
        texts = [text for _, text in spoken]
        task = WordErrors(heard, texts, tokenizer.decode, begin=begin, end=network.config.eos_token_id)
    return Measured(network, task, inputs[:_SURVEYED], "sounds", len(inputs))


def _no_times(tokenizer: Any) -> list[int]:
    number = tokenizer.convert_tokens_to_ids("<|notimestamps|>")
    return [number] if isinstance(number, int) else []
