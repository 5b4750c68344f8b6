"""Task vlm: full runs of `opslot train` on drawn images."""

import copy
import itertools
import json
import shutil
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from opslot._base.errors import ConfigError, DataError
from opslot.distributed import destroy_parallel_state
from opslot.models._multimodal.parts import select
from opslot.trainer.callbacks.writers import SAMPLES_FILE, read_lines, read_metrics
from opslot.verify.tiny import tiny_config
from tests.multimodal import draw, talk, write_model, write_samples
from tests.trainer.runs import trainer_of


@pytest.fixture
def vlm_settings(settings, tmp_path):
    settings["task"] = "vlm"
    settings["model"] = {"config_path": str(write_model(tmp_path / "vlm"))}
    settings["data"] |= {"train_path": str(write_samples(tmp_path / "samples")), "max_seq_len": 96}
    settings["train"] |= {"global_batch_size": 2, "lr": 1e-3}
    return settings


def test_run_and_export(vlm_settings, tmp_path, train):
    vlm_settings["train"] |= {"eval_steps": 2, "checkpoint.save_steps": 2}
    code, out, err = train()
    assert code == 0, err
    from transformers import AutoModelForImageTextToText

    from opslot.trainer.processors import load_processor

    folder = tmp_path / "out" / "hf"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    processor = load_processor(folder)
    assert type(processor).__name__ == "Qwen3VLProcessor"
    assert processor.chat_template
    assert "AutoModelForImageTextToText" in out
    assert "M of them trained" not in out
    assert all("eval_loss" in record for record in read_metrics(tmp_path / "out") if record["step"] % 2 == 0)


def write_damaged(folder, damaged, count=24):
    """Conversations with an image each, of which those with a number in `damaged` do not decode; returns the file."""
    lines = []
    for number in range(count):
        image = draw(folder / f"{number}.png", number)
        if number in damaged:
            image.write_bytes(b"no image")
        lines.append(json.dumps({"messages": talk(image.name)}) + "\n")
    (folder / "chat.jsonl").write_text("".join(lines))
    return folder / "chat.jsonl"


@pytest.fixture
def during_training(monkeypatch):
    """Samples are tokenized during training, in several shards."""
    monkeypatch.setattr("opslot.trainer.run_data._MEDIA_AT_START", 0)
    monkeypatch.setattr("opslot.trainer.run_data._MEDIA_SHARD_BYTES", 600)


@pytest.mark.usefixtures("during_training")
def test_samples_left_out_during_training_are_counted(vlm_settings, tmp_path, train):
    vlm_settings["data"] |= {
        "train_path": str(write_damaged(tmp_path / "train", range(0, 24, 2))),
        "eval_path": str(write_damaged(tmp_path / "eval", range(5, 8), 8)),
        "on_bad_sample": "skip",
    }
    del vlm_settings["train"]["max_steps"]
    vlm_settings["train"] |= {"num_epochs": 1, "eval_steps": 100}
    code, out, err = train()
    assert code == 0, err
    assert (
        "data read so far; 12 samples left out: malformed; 3 samples of data.eval_path left out: malformed"
        in " ".join(out.split())
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("packing", [True, False])
def test_image_that_is_removed_during_training_is_one_error(vlm_settings, tmp_path, train, workers, packing):
    """Without the traceback of the worker."""
    file = write_damaged(tmp_path / "samples", ())
    vlm_settings["data"] |= {"train_path": str(file), "packing": packing, "num_workers": workers}
    vlm_settings["train"] |= {"max_steps": 1, "micro_batch_size": 1}
    assert train()[0] == 0
    for image in file.parent.glob("*.png"):
        image.unlink()
    code, _, err = train("--train.output_dir", str(tmp_path / "again"))
    assert code == 2
    assert err.startswith(f"opslot: error: {file}, line ")
    assert ".png cannot be read (No such file or directory)" in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("during_training")
def test_only_damaged_samples_in_several_shards_raise(vlm_settings, tmp_path, train):
    vlm_settings["data"] |= {"train_path": str(write_damaged(tmp_path / "a", range(24))), "on_bad_sample": "skip"}
    code, _, err = train()
    assert code == 2
    assert "no documents to train on, or to evaluate with\n  found: 24 samples malformed" in err


def test_steps_are_balanced_by_what_is_trained(vlm_settings, tmp_path):
    """A frozen encoder has no backward pass, two thirds of its FLOPs less the input gradient of the patch embedding."""
    trained = trainer_of(vlm_settings, tmp_path).batches
    frozen = trainer_of(vlm_settings, tmp_path, "--train.freeze=[vision, merger]").batches
    assert trained.attention_cost > 0
    assert 1 / 3 <= frozen.encoder_cost / trained.encoder_cost < 1 / 2
    assert frozen.state_dict()["window"] is None
    next(iter(frozen))
    assert frozen.state_dict()["window"]["encoder_cost"] == frozen.encoder_cost


def test_adapters_are_exported_with_the_processor(vlm_settings, tmp_path, train):
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.integrations.peft import MIN_PEFT_VERSION

    from opslot.trainer.processors import load_processor

    base = vlm_settings["model"]["model_path"] = vlm_settings["model"].pop("config_path")
    config = AutoConfig.from_pretrained(base)
    AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    vlm_settings["train"] |= {"max_steps": 1, "freeze": ["vision"]}
    vlm_settings["lora"] = {"r": 2, "merge": True}
    code, out, err = train()
    assert code == 0, err
    folder = tmp_path / "out" / "hf"
    assert f'load it with: AutoModelForImageTextToText.from_pretrained("{folder}")' in out.replace("\n", "")
    # Transformers 5.24 loads adapters with PEFT 0.22 or later alone.
    if Version(version("peft")) >= Version(MIN_PEFT_VERSION):
        assert AutoModelForImageTextToText.from_pretrained(folder).active_adapters() == ["default"]
    for name in (folder, folder / "merged"):
        assert type(load_processor(name)).__name__ == "Qwen3VLProcessor"
    adapters = load_file(folder / "adapter_model.safetensors")
    changed = {name for name, tensor in adapters.items() if "lora_B" in name and tensor.any()}
    assert any("language_model" in name for name in changed)
    assert not any("visual" in name and "merger" not in name for name in changed)
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), folder).merge_and_unload()
    merged = AutoModelForImageTextToText.from_pretrained(folder / "merged")
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merged.state_dict()[name], model.state_dict()[name])


@pytest.mark.parametrize("target", [["vision"], "vision"], ids=["list", "string"])
def test_adapters_on_a_part_raise_with_its_layers(vlm_settings, train, target):
    import re

    from transformers import AutoConfig, AutoModelForImageTextToText

    base = vlm_settings["model"]["model_path"] = vlm_settings["model"].pop("config_path")
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(base)).save_pretrained(base)
    vlm_settings["lora"] = {"r": 2, "target_modules": target}
    code, _, err = train()
    assert code == 2
    message = " ".join(err.split())
    pattern = re.search("vision is a part, and not a linear layer; set it to '(.+?)'", message)[1]
    vlm_settings["lora"]["target_modules"] = pattern
    vlm_settings["train"]["max_steps"] = 1
    code, _, err = train()
    assert code == 0, err


def test_merger_trained_whole_beside_adapters(vlm_settings, tmp_path, train):
    """Qwen's module has the name of the part."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    base = vlm_settings["model"]["model_path"] = vlm_settings["model"].pop("config_path")
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(base)).save_pretrained(base)
    vlm_settings["train"]["max_steps"] = 1
    vlm_settings["lora"] = {"r": 2, "modules_to_save": ["merger"]}
    code, _, err = train()
    assert code == 0, err
    saved = load_file(tmp_path / "out" / "hf" / "adapter_model.safetensors")
    whole = {name for name in saved if "lora_" not in name}
    assert all(name.startswith("base_model.model.model.visual.merger.") for name in whole)
    assert len(whole) == 6
    for name, problem in {
        "deepstack_merger_list": "model.visual.deepstack_merger_list is a list of modules; name each of them, such as",
        "vision": "vision is a part, and not a module; name its modules model.visual.patch_embed",
    }.items():
        vlm_settings["lora"]["modules_to_save"] = [name]
        vlm_settings["train"]["output_dir"] = str(tmp_path / name)
        code, _, err = train()
        assert code == 2
        assert f"lora.modules_to_save: {problem}" in " ".join(err.split())


def test_processor_that_takes_no_text_raises(vlm_settings, monkeypatch):
    """As Voxtral Realtime's, which makes the tokens of a request from audio."""
    from transformers import ProcessorMixin

    from opslot.trainer.processors import load_processor

    class OfAudio(ProcessorMixin):
        def __call__(self, audio=None, **options):
            raise NotImplementedError

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda *_, **__: OfAudio.__new__(OfAudio))
    monkeypatch.setattr("opslot.trainer.processors._without_video", lambda name: None)
    with pytest.raises(ConfigError, match="cannot train with OfAudio, which takes no text"):
        load_processor(vlm_settings["model"]["config_path"])
    # The signature of code that ships with a checkpoint may not name it.
    OfAudio.__call__ = lambda self, *args, **options: None
    assert type(load_processor(vlm_settings["model"]["config_path"])) is OfAudio


def test_package_that_a_processor_or_a_model_needs_is_named(vlm_settings, monkeypatch):
    from transformers import AutoConfig, PreTrainedModel

    from opslot import build_foundation_model
    from opslot.trainer.processors import load_processor

    def failing(*_, **__):
        raise ImportError("This needs the num2words library. You can install it with pip: `pip install num2words`")

    folder = vlm_settings["model"]["config_path"]
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", failing)
    monkeypatch.setattr("opslot.trainer.processors._without_video", lambda name: None)
    with pytest.raises(ConfigError, match="num2words is not installed\n  hint: pip install num2words"):
        load_processor(folder)
    monkeypatch.setattr(PreTrainedModel, "_from_config", failing)
    with pytest.raises(ConfigError, match="num2words is not installed\n  hint: pip install num2words"):
        build_foundation_model(AutoConfig.from_pretrained(folder))


def loss_and_gradients(trainer, batches):
    trainer.model.zero_grad()
    count = sum(trainer.count_targets(batch) for batch in batches)
    loss = 0.0
    for batch in batches:
        part = trainer.forward(batch, count).loss
        part.backward()
        loss += part.item()
    return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_packed_equals_unpacked(vlm_settings, tmp_path):
    vlm_settings["data"] |= {"max_seq_len": 192, "shuffle": False}
    vlm_settings["train"] |= {"global_batch_size": 6}
    trainer = trainer_of(vlm_settings, tmp_path)
    packed = trainer.next_micro_batches(iter(trainer.batches))
    collate_fn, dataset = trainer.data.collate_fn, trainer.train_set
    assert len(packed) == 1
    documents = len(packed[0]["cu_seq_lens_q"]) - 1
    assert documents > 3
    assert len(packed[0]["image_grid_thw"]) > 2
    alone = []
    for number in range(documents):
        (tokens,) = dataset.tokens(number)
        sample = {"input_ids": torch.tensor(tokens["token"].astype("int64")), "lengths": [len(tokens)], "padding": 0}
        sample |= {"labels": torch.tensor(tokens["label"].astype("int64")), "extras": dataset.extras(number)}
        alone.append(collate_fn([sample]))
    loss, gradients = loss_and_gradients(trainer, packed)
    expected, expected_gradients = loss_and_gradients(trainer, alone)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert any("visual" in name for name in gradients)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_loss_equals_that_of_transformers_processor_and_model(vlm_settings, tmp_path):
    from transformers import Qwen3VLForConditionalGeneration

    vlm_settings["data"] |= {"packing": False, "shuffle": False}
    trainer = trainer_of(vlm_settings, tmp_path, "--train.micro_batch_size=1")
    line = json.loads((tmp_path / "samples" / "chat.jsonl").read_text().splitlines()[1])
    processor = trainer.encoder.processor
    text = processor.apply_chat_template(line["messages"], tokenize=False)
    from PIL import Image

    images = [Image.open(tmp_path / "samples" / line["messages"][0]["content"][0]["image"])]
    inputs = processor(text=[text], images=images, return_tensors="pt")
    labels = inputs["input_ids"].clone()
    prompt = processor.apply_chat_template(line["messages"][:1], tokenize=False, add_generation_prompt=True)
    labels[:, : processor(text=[prompt], images=images, return_tensors="pt")["input_ids"].shape[1]] = -100
    labels[:, -1] = -100  # the line break after the end of the turn
    config = copy.deepcopy(trainer.model.config)
    config._attn_implementation = "eager"
    theirs = Qwen3VLForConditionalGeneration(config)
    theirs.load_state_dict(trainer.model.state_dict())
    expected = theirs(**inputs, labels=labels).loss.item()
    batch = trainer.data.collate_fn([trainer.train_set[1]])
    assert trainer.forward(batch, trainer.count_targets(batch)).loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("options", [{"train.fsdp.param_dtype": "bfloat16"}, {"model.torch_dtype": "bfloat16"}, {}])
def test_features_in_the_dtype_of_the_computation(vlm_settings, tmp_path, options):
    """Half of the memory and of the copies of float32, with the same result."""
    vlm_settings["data"]["shuffle"] = False
    trainer = trainer_of(vlm_settings, tmp_path, *(f"--{name}={value}" for name, value in options.items()))
    collate_fn = trainer.data.collate_fn
    losses, gradients, dtypes = [], [], []
    for dtype in (collate_fn.dtype, None):
        collate_fn.dtype = dtype
        batch = collate_fn([trainer.train_set[number] for number in range(3)])
        dtypes.append(batch["pixel_values"].dtype)
        loss, found = loss_and_gradients(trainer, [batch])
        losses.append(loss)
        gradients.append(found)
    assert dtypes == [torch.bfloat16 if options else torch.float32, torch.float32]
    assert losses[0] == losses[1]
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[1])


@pytest.mark.quick("2")
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact(vlm_settings, tmp_path, train, workers):
    vlm_settings["train"] |= {"max_steps": 6, "checkpoint.save_steps": 3}
    vlm_settings["data"] |= {"num_workers": workers, "max_tokens_per_batch": 96}
    code, _, err = train()
    assert code == 0, err
    whole = [(record["step"], record["loss"]) for record in read_metrics(tmp_path / "out")]
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step_00000006")
    code, out, err = train("--train.checkpoint.resume_from=latest")
    assert code == 0, err
    assert "step_00000003 (step 3)" in out
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path / "out")] == whole


@pytest.mark.parametrize("part", ["vision", "merger", "language_model"])
def test_frozen_part_gets_no_gradient(vlm_settings, tmp_path, part):
    vlm_settings["train"]["freeze"] = [part]
    trainer = trainer_of(vlm_settings, tmp_path)
    _, gradients = loss_and_gradients(trainer, trainer.next_micro_batches(iter(trainer.batches)))
    frozen = {name for name, p in trainer.model.named_parameters() if not p.requires_grad}
    inside = {
        "vision": lambda name: ".visual." in name and "merger" not in name,
        "merger": lambda name: "merger" in name,
        "language_model": lambda name: "language_model" in name or "lm_head" in name,
    }[part]
    assert frozen == {name for name, _ in trainer.model.named_parameters() if inside(name)}
    assert not frozen & gradients.keys()
    assert gradients
    assert "of them trained" in trainer.title
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.optimizer.step()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert not changed & frozen


def test_text_with_a_frozen_language_model(vlm_settings, tmp_path):
    vlm_settings["train"]["freeze"] = ["language_model"]
    vlm_settings["data"] |= {"packing": False, "shuffle": False}
    trainer = trainer_of(vlm_settings, tmp_path, "--train.micro_batch_size=1")
    micro_batches = trainer.next_micro_batches(iter(trainer.batches))
    assert ["pixel_values" in batch for batch in micro_batches] == [False, True]
    loss, _, grad_norm = trainer._forward_backward(micro_batches, sum(map(trainer.count_targets, micro_batches)))
    assert loss > 0
    assert grad_norm > 0


def test_micro_batches_of_text_before_the_first_image(vlm_settings, tmp_path, train):
    """FSDP in one process, with a tower that is not used in a backward pass without reduction."""
    text = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a"}]
    file = tmp_path / "text.jsonl"
    file.write_text(f"{json.dumps({'messages': text})}\n" * 4)
    vlm_settings["data"] |= {"train_path": str(file), "packing": False}
    vlm_settings["train"] |= {"global_batch_size": 2, "micro_batch_size": 1, "max_steps": 2}
    vlm_settings["train"]["fsdp"] = {"param_dtype": "bfloat16"}
    try:
        code, _, err = train()
    finally:
        destroy_parallel_state()
    assert code == 0, err


def test_unknown_part_raises(vlm_settings, tmp_path):
    vlm_settings["train"]["freeze"] = ["visoin"]
    with pytest.raises(ConfigError, match=r"'visoin' matches no parameter.*did you mean 'vision'"):
        trainer_of(vlm_settings, tmp_path)


def test_part_that_the_model_lacks_is_not_suggested():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    with pytest.raises(ConfigError, match="'visoin' matches no parameter") as error:
        select(model, "visoin", "train.freeze")
    assert "did you mean" not in str(error.value)


def test_learning_rates_of_parts(vlm_settings, tmp_path):
    vlm_settings["train"] |= {"lr_of": {"vision": 1e-5, "*.merger.*": 5e-4}, "lr_scheduler": "constant"}
    trainer = trainer_of(vlm_settings, tmp_path)
    trainer._train_step(iter(trainer.batches))
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert rates["model.visual.blocks.0.attn.qkv.weight"] == pytest.approx(1e-5)
    assert rates["model.visual.merger.linear_fc1.weight"] == pytest.approx(5e-4)
    assert rates["model.language_model.layers.0.mlp.up_proj.weight"] == pytest.approx(1e-3)


def test_fields_of_vlm_in_another_task(vlm_settings, train):
    vlm_settings |= {"task": "sft"}
    vlm_settings["model"]["export_excluded"] = True
    code, _, err = train()
    assert code == 2
    assert "model.export_excluded is for task vlm, and task is sft" in err


def test_missing_processor_raises(vlm_settings, tmp_path, train):
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "vlm" / name).unlink(missing_ok=True)
    code, _, err = train()
    assert code == 2
    assert "task vlm needs a processor" in err
    assert "copy processor_config.json" in err


def test_language_model_raises(settings, tmp_path, train):
    settings["task"] = "vlm"
    write_model(tmp_path / "llm")
    (tmp_path / "llm" / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 1}))
    settings["model"] = {"config_path": str(tmp_path / "llm")}
    settings["data"]["train_path"] = str(write_samples(tmp_path / "samples"))
    code, _, err = train()
    assert code == 2
    assert "'qwen3' is a language model" in err


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("wav2vec2-bert", "Wav2Vec2BertForCTC"), ("vit", "ViTForImageClassification")]
)
def test_model_that_generates_no_text_raises(model_type, architecture):
    """Such as one with a CTC head, which is not a language model either."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from opslot.trainer.processors import multimodal_class

    config = CONFIG_MAPPING[model_type](architectures=[architecture])
    with pytest.raises(ConfigError, match=f"none of type '{model_type}'\n  found: {architecture}\n  hint: .*loop"):
        multimodal_class(config)


def test_registered_processor_is_used(vlm_settings, tmp_path):
    from transformers import Qwen3VLProcessor

    from opslot.models import MODEL_PROCESSOR_REGISTRY
    from opslot.trainer.processors import load_processor

    class Patched(Qwen3VLProcessor):
        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    try:
        MODEL_PROCESSOR_REGISTRY.register("Qwen3VLProcessor")(lambda: Patched)
        assert type(load_processor(vlm_settings["model"]["config_path"])) is Patched
    finally:
        MODEL_PROCESSOR_REGISTRY._factories.pop("Qwen3VLProcessor")


def test_config_registered_after_its_architecture_is_used(monkeypatch, vlm_settings):
    from transformers import Qwen3VLConfig

    from opslot.models import MODEL_CONFIG_REGISTRY, load_config, serve_model_type

    class Patched(Qwen3VLConfig):
        pass

    monkeypatch.setattr(MODEL_CONFIG_REGISTRY, "_factories", dict(MODEL_CONFIG_REGISTRY._factories))
    assert serve_model_type("qwen3_vl")
    MODEL_CONFIG_REGISTRY.register("qwen3_vl")(lambda: Patched)
    assert type(load_config(vlm_settings["model"]["config_path"])) is Patched


def test_changed_image_raises_during_training(vlm_settings, tmp_path):
    trainer = trainer_of(vlm_settings, tmp_path)
    for number in range(1, 12):
        for image in (tmp_path / "samples" / "img").glob(f"{number}_*.png"):
            draw(image, number + 1)
    with pytest.raises(DataError, match=r"line \d+: its images, video or audio have changed"):
        list(itertools.islice(trainer.batches, 8))


@pytest.mark.parametrize("model_type", ["audioflamingo3", "musicflamingo"])
def test_type_of_audio_in_one_mapping_of_transformers(model_type, tmp_path):
    """Transformers has them as sequence-to-sequence models, although they have a decoder alone."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from opslot.cli.generate import _auto_class
    from opslot.trainer.main import _load_command
    from opslot.trainer.processors import multimodal_class

    config = CONFIG_MAPPING[model_type]()
    config.architectures = [multimodal_class(config)]
    auto = _auto_class(config)
    assert type(config) in auto._model_mapping
    config.save_pretrained(tmp_path)
    assert _load_command(tmp_path, config) == f'{auto.__name__}.from_pretrained("{tmp_path}")'


@pytest.mark.parametrize(
    ("architecture", "auto"),
    [
        ("Qwen3_5ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("Qwen3_5ForCausalLM", "AutoModelForCausalLM"),
    ],
)
def test_generate_loads_the_class_that_the_config_names(architecture, auto):
    """Adapters trained with images have other names than those of the language model of the same type."""
    from opslot.cli.generate import _auto_class

    config = tiny_config("qwen3_5")
    config.architectures = [architecture]
    assert _auto_class(config).__name__ == auto


@pytest.fixture
def saved_model(tmp_path):
    """A checkpoint with random weights, and a drawn image."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = str(write_model(tmp_path / "vlm"))
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder, str(draw(tmp_path / "circle.png", 1))


def answer_of_transformers(folder, image, text, max_new_tokens):
    """Without sampling, about an image before the text."""
    from transformers import AutoModelForImageTextToText

    from opslot.trainer.processors import load_processor

    processor = load_processor(folder)
    parts = [{"type": "image", "path": image}, {"type": "text", "text": text}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert "pixel_values" in inputs
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_generate_about_an_image_equals_transformers(saved_model, capsys):
    from opslot.cli import main

    folder, image = saved_model
    given = ["generate", folder, "--prompt", "What is it?", "--max-new-tokens", "6", "--device", "cpu"]
    assert main([*given, "--image", image]) == 0
    assert capsys.readouterr().out == f"{answer_of_transformers(folder, image, 'What is it?', 6)}\n"


@pytest.mark.parametrize(
    "changes",
    [{}, {"data_parallel_mode": "fsdp2"}, {"fsdp": {"param_dtype": "bfloat16"}}],
    ids=["one process", "fsdp2", "copies"],
)
def test_prompts_of_the_evaluation_with_an_image(vlm_settings, tmp_path, train, changes):
    """Transformers encodes images outside of the forward pass, where parameters may be shards or in float32."""
    image = str(draw(tmp_path / "circle.png", 1))
    vlm_settings["train"] |= {"eval_steps": 2, "max_steps": 2, **changes}
    prompts = [{"text": "What is it?", "images": [image]}, "What is it?"]
    vlm_settings["evaluation"] = {"prompts": prompts, "max_new_tokens": 6}
    code, out, err = train()
    assert code == 0, err
    first, second = read_lines(tmp_path / "out" / SAMPLES_FILE)
    expected = answer_of_transformers(tmp_path / "out" / "hf", image, "What is it?", 6)
    assert first == {"step": 2, "prompt": "What is it?", "media": [image], "answer": expected}
    assert second["prompt"] == "What is it?"
    assert "media" not in second
    assert f"  'What is it?' ({image}) -> {expected!r}" in out


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"text": "What?", "images": ["missing.png"]}, "evaluation.prompts[0], 'What?' (missing.png): "),
        ({"text": "What?", "audios": ["missing.wav"]}, "has audio, which Qwen3VLProcessor cannot process"),
        ({"text": "What?", "image": ["a.png"]}, "evaluation.prompts[0] has image; beside text, known are images"),
        ({"text": "What?", "images": "a.png"}, "evaluation.prompts[0] has images that is not a list of paths"),
        ({"images": ["a.png"]}, "evaluation.prompts[0] is neither a text nor a mapping with text"),
    ],
)
def test_bad_prompts_of_the_evaluation_raise(vlm_settings, tmp_path, train, prompt, message):
    vlm_settings["train"]["eval_steps"] = 2
    vlm_settings["evaluation"] = {"prompts": [prompt]}
    code, _, err = train()
    assert code == 2
    assert message in err
    assert not read_metrics(tmp_path / "out")


def test_prompts_with_media_in_another_task_raise(settings, train):
    settings["train"]["eval_steps"] = 2
    settings["evaluation"] = {"prompts": [{"text": "What?", "images": ["a.png"]}]}
    code, _, err = train()
    assert code == 2
    assert "evaluation.prompts[0] has media, and task is pretrain" in err


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("image", [], "--prompt with {path}: the image {path} does not decode"),
        ("audio", [], "--prompt with {path}: has audio, which Qwen3VLProcessor cannot process"),
        ("image", ["--raw"], "--image needs a chat turn, and --raw is given"),
        ("image", ["--image", "missing.png"], "--image: missing.png is not a file"),
        ("image", ["--use-audio-in-video"], "Qwen3VLProcessor does not take the audio of videos"),
    ],
)
def test_generate_with_media_that_cannot_be_given_raises(saved_model, tmp_path, capsys, kind, more, message):
    from opslot.cli import main

    broken = tmp_path / "broken.bin"
    broken.write_bytes(b"none")
    given = ["generate", saved_model[0], "--prompt", "What?", "--device", "cpu", f"--{kind}", str(broken), *more]
    assert main(given) == 2
    assert message.format(path=broken) in capsys.readouterr().err


def test_generate_with_a_limit_of_training(saved_model, monkeypatch, capsys):
    from opslot.cli import main
    from opslot.data.multimodal import loading

    folder, image = saved_model
    sizes = []
    load = loading.load_image
    monkeypatch.setattr(loading, "load_image", lambda *given: sizes.append(load(*given).size) or load(*given))
    given = ["generate", folder, "--prompt", "What?", "--max-new-tokens", "1", "--device", "cpu"]
    assert main([*given, "--image", image, "--max-pixels", "600"]) == 0
    assert [width * height <= 600 for width, height in sizes] == [True]
    assert main([*given, "--max-fps", "2"]) == 2
    assert "--max-fps is of media, and none are given" in capsys.readouterr().err
