"""Models that several threads run, look into and change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nlflow.attention import Adapter, attach, detach, discretize_blocks, probe, survey  # needs torch
from nlflow.errors import InputError
from tests.transformer_models import build, inputs, output, torch


def at_the_middle(module: Any, work: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Return a hook before a module that once lets another thread do its work, and where the result will be.

    So the two overlap in the same way each time.
    """
    found: list[Any] = []

    def other() -> None:
        try:
            found.append(work())
        except Exception as error:  # of another thread; the test looks at it
            found.append(error)

    def hook(*_: Any) -> None:
        if not found and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(60)

    return module.register_forward_pre_hook(hook), found


def numbers(trace: Any) -> list[Any]:
    rows = trace.rows(spectra=False)
    return [value for row in rows for value in row.values() if isinstance(value, float)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_probe_is_of_its_own_thread(name: str) -> None:
    """While a probe is in the second layer, another thread runs the model, or probes it, on other tokens."""
    model, own, others = build(name, "sdpa"), inputs(name), inputs(name, seed=1)
    expected, beside = numbers(probe(model, own)), numbers(probe(model, others))
    flows = [one.layer for one in discretize_blocks(model, others, substeps=(1,))]
    with torch.no_grad():
        plain = output(model, others)
    middle = next(module for key, module in model.named_modules() if key.endswith(("layer.1", "h.1", "layers.1")))

    def run() -> Any:
        with torch.no_grad():
            return output(model, others)

    for work, check in (
        (run, lambda found: torch.equal(found, plain)),
        (lambda: numbers(probe(model, others)), lambda found: np.array_equal(found, beside, equal_nan=True)),
        (
            lambda: survey(model, [others]).states[2].values["share"],
            lambda found: np.isfinite(found).all(),
        ),
        (
            lambda: [one.layer for one in discretize_blocks(model, others, substeps=(1,))],
            lambda found: found == flows,
        ),
    ):
        handle, found = at_the_middle(middle, work)
        assert np.array_equal(numbers(probe(model, own)), expected, equal_nan=True)
        handle.remove()
        assert not isinstance(found[0], Exception), found[0]
        assert check(found[0])
        assert model.config._attn_implementation == "sdpa"
    assert torch.equal(run(), plain)


@pytest.mark.on_cpu("the pretended device is there in one thread")
def test_modules_of_torch_are_of_their_own_thread() -> None:
    layers = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    model = torch.nn.TransformerEncoder(layers, 2, enable_nested_tensor=False).eval()
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    expected, beside = numbers(probe(model, x)), numbers(probe(model, y))
    before = torch.backends.mha.get_fastpath_enabled(), torch.nn.functional.scaled_dot_product_attention
    handle, found = at_the_middle(model.layers[1], lambda: numbers(probe(model, y)))
    assert np.array_equal(numbers(probe(model, x)), expected, equal_nan=True)
    handle.remove()
    assert np.array_equal(found[0], beside, equal_nan=True)
    assert before == (torch.backends.mha.get_fastpath_enabled(), torch.nn.functional.scaled_dot_product_attention)


def test_a_model_with_terms_runs_in_two_threads() -> None:
    """Masks of FeatScale, and values of modules that sum by themselves, belong to a call."""
    model = attach(build("bert", "sdpa"), fidelity=0.6, feat_scale=True)
    with torch.no_grad():
        for key, one in model.named_parameters():
            if ".feat." in key:
                one += 0.3
    own, others = inputs("bert"), inputs("bert", seed=1)
    others["attention_mask"] = torch.ones_like(others["attention_mask"])
    with torch.no_grad():
        first, second = output(model, own), output(model, others)

        def run() -> Any:
            with torch.no_grad():
                return output(model, others)

        handle, found = at_the_middle(model.encoder.layer[1].attention.output.dense, run)
        assert torch.equal(output(model, own), first)
        handle.remove()
    assert torch.equal(found[0], second)


def test_who_would_be_wrong_is_refused() -> None:
    model, given = build("bert", "sdpa"), inputs("bert")
    middle = model.encoder.layer[1]
    model.train()
    handle, found = at_the_middle(middle, lambda: model(**given))
    probe(model, given)  # in evaluation mode, which another thread would take for its training
    handle.remove()
    assert isinstance(found[0], InputError)
    assert "another thread has put the training into evaluation mode, while this one runs it" in str(found[0])
    model.eval()
    for work, said in ((lambda: attach(model), "gives it terms"), (lambda: detach(model), "")):
        handle, found = at_the_middle(middle, work)
        probe(model, given)
        handle.remove()
        assert isinstance(found[0], InputError) == bool(said)
        assert said in str(found[0])
    handle, found = at_the_middle(middle, lambda: probe(model, given))
    attach(model)  # whose trial runs the model
    handle.remove()
    assert isinstance(found[0], InputError)
    assert "another thread gives it terms, while this one looks into it" in str(found[0])
    assert len(probe(model, given)) == 3
    assert not any("refuse" in repr(hook) for one in model.modules() for hook in one._forward_pre_hooks.values())


def test_the_name_of_the_function_comes_back() -> None:
    model, given = build("bert", "eager"), inputs("bert")
    with pytest.raises(InputError, match="input_ids: got numbers"):
        probe(model, {"input_ids": given["input_ids"].float()})

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    handle = model.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        probe(model, given)
    handle.remove()
    assert model.config._attn_implementation == "eager"
    assert len(probe(model, given, adapter=Adapter("BertSelfAttention"))) == 3
