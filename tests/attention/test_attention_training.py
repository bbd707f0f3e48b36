"""Terms under the tools of training: PEFT, Trainer, gradient checkpointing, caches, several devices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from nlflow.errors import InputError, NlflowWarning
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
pytest.importorskip("transformers")

from nlflow.attention import attach, detach, load_model, load_terms, save_terms  # noqa: E402
from nlflow.attention.injection import attach as module_of_attach  # noqa: E402
from nlflow.attention.terms.neutreno import neutreno  # noqa: E402
from tests.transformer_models import checkpointed  # noqa: E402
from validation.families import outputs, same  # noqa: E402
from validation.tiny_inputs import inputs_of  # noqa: E402
from validation.tiny_models import build  # noqa: E402

PROJECTIONS = {"bert": "query", "falcon": "query_key_value", "siglip_vision_model": "q_proj"}
KINDS = tuple(PROJECTIONS)  # asks for its function, sums by itself, drops keywords


def adapted(model: Any, kind: str, **options: Any) -> Any:
    """Return a model with adapters of low rank, which begin as none."""
    peft = pytest.importorskip("peft", reason="needs peft and accelerate")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=[PROJECTIONS[kind]], **options))


def strengths(model: Any) -> dict[str, Any]:
    return {name: one for name, one in model.named_parameters() if "neutreno" in name}


def alike(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in zip(ours, theirs, strict=True))


def step(model: Any, given: Any) -> None:
    """Take one step of training that can be seen."""
    model.train()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    model(**given)[0].sin().sum().backward()
    optimizer.step()
    model.eval()


@pytest.mark.slow  # PEFT imports all of transformers
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # an old name, which PEFT asks for
@pytest.mark.parametrize("inner", [False, True], ids=["wrapper", "inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_terms_attached_after_peft_learn_and_are_kept(kind: str, inner: bool, tmp_path: Path) -> None:
    stock = build(kind)
    given = inputs_of(stock)
    model = adapted(copy.deepcopy(stock), kind)
    attach(model.get_base_model() if inner else model, learned=True, fidelity=0.4)
    assert alike(outputs(model, given), outputs(attach(copy.deepcopy(stock), fidelity=0.4, learned=True), given))
    step(model, given)
    assert strengths(model)
    assert all(float(one.grad) != 0 for one in strengths(model).values())

    expected = outputs(model, given)
    model.save_pretrained(tmp_path)
    save_terms(model, tmp_path)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(copy.deepcopy(stock), tmp_path).eval()
    assert not same(outputs(loaded, given), expected)
    assert same(outputs(load_terms(loaded, tmp_path), given), expected)

    merged = model.merge_and_unload()  # the adapters are in the weights now; the terms are still there
    if kind == "falcon":  # the projections whose hooks have its term are gone
        with pytest.raises(InputError, match=r"another query_key_value in .*h\.0\.self_attention than when"):
            merged(**given)
        merged.save_pretrained(tmp_path / "merged")
        assert alike(outputs(load_model(tmp_path / "merged"), given), expected)
    else:
        assert alike(outputs(merged, given), expected)
        merged.save_pretrained(tmp_path / "merged")
        assert alike(outputs(load_model(tmp_path / "merged"), given), expected)
    assert not strengths(detach(model))
    merged.save_pretrained(tmp_path / "stock")
    assert not (tmp_path / "stock" / "attention.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_strengths_that_peft_freezes_are_told(kind: str) -> None:
    stock = build(kind)
    given = inputs_of(stock)
    model = adapted(attach(stock, learned=True), kind)
    if kind == "falcon":  # whose values would be those without the adapter
        with pytest.raises(InputError, match=r"another query_key_value in h\.0\.self_attention than when"):
            model(**given)
        return
    with pytest.warns(NlflowWarning, match=r"would learn is frozen.*call attach after get_peft_model"):
        step(model, given)
    step(model, given)  # once
    plain = adapted(attach(build(kind), fidelity=0.4), kind)  # nothing to learn: nothing to tell
    step(plain, given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_terms_that_peft_wraps_are_refused(kind: str) -> None:
    stock = build(kind)
    given = inputs_of(stock)
    model = adapted(attach(stock, learned=True), kind, modules_to_save=["neutreno"])
    with pytest.raises(InputError, match=r"another neutreno in .* than when it was attached \(PEFT puts others there,"):
        model(**given)


def test_what_peft_does_without_peft() -> None:
    """It freezes what is there and lets others learn, or puts a copy in the place of a module."""
    model = attach(build("bert"), learned=True)
    given = inputs_of(model)
    for one in strengths(model).values():
        one.requires_grad = False
    with pytest.warns(NlflowWarning, match=r"terms of encoder\.layer\.1\.attention\.self.*would learn is frozen"):
        step(model, given)
    step(model, given)  # it is told once
    for one in model.parameters():
        one.requires_grad = False
    attach(model, fidelity=0.4).train()(**given)  # nothing learns: nothing to tell
    module = model.encoder.layer[1].attention.self
    module.neutreno = copy.deepcopy(module.neutreno)
    with pytest.raises(InputError, match=r"another neutreno in encoder\.layer\.1\.attention\.self than"):
        model(**given)


@pytest.mark.on_cpu("torch quantizes on the CPU alone")
@pytest.mark.filterwarnings("ignore:torch", "ignore:.*quant")  # torch.ao tells of its successor
@pytest.mark.parametrize("kind", ["bert", "gptj"])
def test_models_that_are_quantized_after_attach(kind: str) -> None:
    """It hands the hooks on to the projections that it makes."""
    model = attach(build(kind), fidelity=0.4)
    given = inputs_of(model)
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    assert not same(outputs(model, given), outputs(detach(model), given))


def test_projections_that_are_replaced_are_refused() -> None:
    model = attach(build("gptj"), fidelity=0.4)
    own = model.h[1].attn
    own.v_proj = copy.deepcopy(own.v_proj)
    own.v_proj._forward_hooks.clear()
    with pytest.raises(InputError, match=r"another v_proj in h\.1\.attn than when it was attached"):
        model(**inputs_of(model))


@pytest.mark.on_cpu("transformers' own from_pretrained asks for accelerate under a default device")
def test_what_terms_have_learned_is_no_unexpected_weight(tmp_path: Path) -> None:
    """The report of the weights that a model does not take names others, and is transformers' own afterwards."""
    import logging

    from safetensors.torch import load_file, save_file
    from transformers import BertModel

    attach(build("bert"), fidelity=0.4, learned=True).save_pretrained(tmp_path)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(handler)
    try:
        load_model(tmp_path)
        assert told == []
        path = tmp_path / "model.safetensors"
        save_file({**load_file(path), "other": torch.ones(1)}, path, {"format": "pt"})
        load_model(tmp_path)
        assert len(told) == 1
        assert "other" in told[0]
        assert "neutreno" not in told[0]
        BertModel.from_pretrained(tmp_path)
        assert "neutreno" in told[1]
    finally:
        logger.removeHandler(handler)


def test_parts_save_the_terms_too(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    model = attach(BertForSequenceClassification(build("bert").config).eval(), fidelity=0.4, learned=True)
    given = inputs_of(build("bert"))
    model.bert.save_pretrained(tmp_path)
    assert alike(outputs(load_model(tmp_path), given), outputs(model.bert, given))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # without an accelerator
def test_checkpoints_of_a_trainer_hold_the_terms(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments

    config = build("bert").config
    generator = torch.Generator().manual_seed(1)
    data = [
        {"input_ids": torch.randint(1, 40, (8,), generator=generator), "labels": torch.tensor(i % 2)} for i in range(8)
    ]

    def trained(start: str | None) -> Any:
        torch.manual_seed(0)
        model = attach(BertForSequenceClassification(config), learned=True, fidelity=0.4)
        options: Any = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=4, learning_rate=0.1, **options
        )
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=start)
        return model.eval()

    model = trained(None)
    given = {"input_ids": data[0]["input_ids"][None]}
    assert {"attention.json", "terms.safetensors"} < {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert all(abs(float(one.detach().exp()) - 0.4) > 0.01 for one in strengths(model).values())
    folder = tmp_path / "checkpoint-2"
    loaded = load_terms(BertForSequenceClassification.from_pretrained(folder), folder)
    assert alike(outputs(loaded.eval(), given), outputs(model, given))
    again = trained(str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(strengths(again)[name], one) for name, one in strengths(model).items())


@pytest.mark.parametrize("kind", ["siglip_vision_model", "falcon"])
def test_checkpointing_without_keywords_is_refused_by_name(kind: str) -> None:
    model = attach(build(kind), fidelity=0.4)
    checkpointed(model)
    model.train()
    given = {**inputs_of(model), **({"use_cache": False} if kind == "falcon" else {})}
    loss = model(**given)[0].square().sum()
    with pytest.raises(InputError, match=r"layers\.|h\.\d.*gradient checkpointing.*switch\s+checkpointing off"):
        loss.backward()


def test_a_training_that_fills_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward, in which the layout is looked for, has keys with a graph in its cache."""
    model = build("falcon").train()
    given = inputs_of(model)
    monkeypatch.setattr(module_of_attach, "try_out", lambda *_: None)
    attach(model, fidelity=0.4, learned=True)
    model(**given, use_cache=True)[0].square().sum().backward()
    assert all(one.grad is not None and float(one.grad) != 0 for one in strengths(model).values())


@pytest.mark.parametrize("implicit", [False, True])
def test_one_strength_serves_layers_on_several_devices(implicit: bool) -> None:
    """``meta`` stands for another device: it has shapes and no numbers."""
    tokens = torch.empty(2, 3, 4, device="meta")
    found = neutreno(tokens, tokens, tokens, torch.tensor(0.4), semi_implicit=implicit)
    assert found.device.type == "meta"
