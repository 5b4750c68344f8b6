"""Task vlm with the processors of many families: text and media mixed and packed equal the samples alone."""

import importlib.util
import itertools
import json
import wave

import numpy as np
import pytest
import torch
import transformers
import yaml
from packaging.version import Version
from PIL import Image
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from opslot.trainer import load_config
from opslot.trainer.callbacks.writers import read_metrics
from opslot.trainer.vlm import VLMTrainer
from tests.processors import write_checkpoint
from tests.trainer.runs import run_config

# Packed documents would see each other.
UNPACKED = ("hunyuan_vl", "mllama", "qwen2_audio")
QUICK = ("gemma3", "llava_next")
SLOW = (
    "audioflamingo3",
    "aya_vision",
    "cohere2_vision",
    "cohere_compass",
    "cosmos3_edge",
    "deepseek_vl",
    "exaone4_5",
    "gemma4",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm5_next",
    "glmasr",
    "got_ocr2",
    "granite_speech",
    "granite_speech_plus",
    "hy_v4_vl",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "inkling2",
    "internvl",
    "janus",
    "kimi_k25",
    "lfm2_vl",
    "lfm3_vl",
    "lighton_ocr",
    "llama4",
    "llava",
    "llava_next_video",
    "llava_onevision",
    "minimax_m3_vl",
    "mistral3",
    "moss_transcribe_diarize",
    "musicflamingo",
    "omniasr",
    "ovis2",
    "paddleocr_vl",
    "paligemma",
    "phi4_multimodal",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_asr",
    "qwen3_omni_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "vibevoice_asr",
    "video_llama_3",
)
# Before Transformers 5.24, its get_video_features counts the frames of a video that it merges, and raises.
WITHOUT_VIDEO = ("kimi_k25",) if Version(transformers.__version__) < Version("5.24") else ()
# Audio has another projection in a batch with images.
WITHOUT_AUDIO = ("phi4_multimodal",)
_COMPONENTS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}


def talk(*parts):
    question = [*parts, {"type": "text", "text": "what?"}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "a red circle"}]}


def kinds_of(family):
    """The media that the processor of a family takes."""
    parts = getattr(transformers, PROCESSOR_MAPPING_NAMES[family]).get_attributes()
    found = {kind for kind, names in _COMPONENTS.items() if {*names} & {*parts}}
    found -= {"audio"} if family in WITHOUT_AUDIO else set()
    return found - {"video"} if family in WITHOUT_VIDEO else found


def samples(folder, kinds):
    """Text, one image, two images, a video, and audio."""
    rng = np.random.default_rng(0)
    for name, size in {"1": (24, 28), "2": (28, 28), "frame": (24, 32)}.items():
        pixels = rng.integers(0, 255, (*size, 3)).astype("uint8")
        Image.fromarray(pixels).save(folder / f"{name}.png")
    with wave.open(str(folder / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((8000 * np.sin(np.arange(4000) / 9)).astype("<i2").tobytes())
    first, second = ({"type": "image", "image": f"{number}.png"} for number in (1, 2))
    video = {"type": "video", "video": {"frames": ["frame.png"] * 4, "fps": 2}}
    found = {"image": [talk(first), talk(second, first)], "video": [talk(video)]}
    found["audio"] = [talk({"type": "audio", "audio": "tone.wav"})]
    return [talk(), *(sample for kind in found if kind in kinds for sample in found[kind])]


def write_run(family, settings, folder):
    """A checkpoint of a family and its samples; returns the samples."""
    try:
        kinds = kinds_of(family)
        if "video" in kinds and importlib.util.find_spec("torchvision") is None:
            pytest.skip(f"the video processor of {family} needs torchvision")
        write_checkpoint(folder, family)
    except ImportError as error:
        pytest.skip(str(error).strip().splitlines()[0])
    lines = samples(folder, kinds)
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings |= {"task": "vlm", "model": {"config_path": str(folder)}}
    settings["data"] |= {"train_path": str(folder / "chat.jsonl"), "max_seq_len": 5120, "shuffle": False}
    settings["train"] |= {"global_batch_size": len(lines)}
    return lines


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_packed_families_equal_unpacked(family, settings, tmp_path):
    lines = write_run(family, settings, tmp_path)
    alone, losses = take_step(family_trainer(settings, tmp_path, packing=False))
    assert len(alone) == len(lines)
    # One step of every sample once.
    size = sum(batch["labels"].shape[1] - padding(batch) for batch in alone)
    settings["data"]["max_seq_len"] = size
    settings["train"]["global_batch_size"] = 1
    (packed,), expected = take_step(family_trainer(settings, tmp_path, packing=True))
    assert len(packed["cu_seq_lens_q"]) == len(lines) + 1
    assert losses == pytest.approx(expected, rel=1e-5)


# Features are placed inside of the language model, layers mix tokens, or forwards count their own labels.
UNSHARDED = ("inkling2", "mllama", "phi4_multimodal", "qwen2_audio")
FAMILIES = (*QUICK, *SLOW, *UNPACKED)


@pytest.mark.quick("llava_next")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNSHARDED])
def test_families_on_shards_equal_one_process(family, settings, ranks, tmp_path):
    """Sequence-parallel ranks share the images, videos and audio of each sample."""
    lines = write_run(family, settings, tmp_path)
    settings["data"]["packing"] = False
    settings["train"] |= {"micro_batch_size": 1, "max_steps": 1, "global_batch_size": len(lines)}
    rows = []
    for name, size in (("one", 1), ("two", 2)):
        settings["train"] |= {"output_dir": str(tmp_path / name), "sp_size": size}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings))
        codes = [run_config(str(file))] if size == 1 else ranks.run(run_config, str(file), timeout=180)
        assert set(codes) == {0}
        rows += [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name)]
    assert rows[1] == pytest.approx(rows[0], rel=1e-4)


def family_trainer(settings, folder, *, packing):
    settings["data"]["packing"] = packing
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return VLMTrainer(load_config([str(file), *([] if packing else ["--train.micro_batch_size=1"])]), callbacks=[])


def take_step(trainer):
    """The micro batches of a step, and its loss."""
    batches = trainer.next_micro_batches(iter(trainer.batches))
    count = sum(map(trainer.count_targets, batches))
    return batches, sum(trainer.forward(batch, count).loss.item() for batch in batches)


def padding(batch):
    mask = batch.get("attention_mask")
    return 0 if mask is None else int((mask == 0).sum())


@pytest.mark.quick("mllama")
@pytest.mark.parametrize("family", UNPACKED)
def test_family_without_packing(family, settings, train, tmp_path):
    """Packing raises with the reason; without it, losses and gradients are those of Transformers."""
    lines = write_run(family, settings, tmp_path)
    code, _, error = train()
    assert code == 2
    assert "cannot train on packed documents" in error
    settings["data"]["packing"] = False
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    trainer = VLMTrainer(
        load_config([str(file), "--train.micro_batch_size=1", "--model.ops_implementation=eager"]), callbacks=[]
    )
    theirs = getattr(transformers, type(trainer.model).__name__)._from_config(trainer.model.config)
    theirs.load_state_dict(trainer.model.state_dict())
    batches = trainer.next_micro_batches(iter(trainer.batches))
    assert len(batches) == len(lines)
    for batch in batches:
        count = trainer.count_targets(batch)
        losses = [trainer.forward(batch, count).loss, theirs(**batch, use_cache=False).loss]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
        for loss in losses:
            loss.backward()
    for (name, found), wanted in zip(trainer.model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_processor_of_another_model(settings, train, tmp_path):
    """The error names file and line of a sample whose processor makes other numbers of tokens than of features."""
    write_checkpoint(tmp_path, "llava")
    file = tmp_path / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_additional_image_tokens": 7}))
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples(tmp_path, {"image"})))
    settings |= {"task": "vlm", "model": {"config_path": str(tmp_path)}}
    settings["data"] |= {"train_path": str(tmp_path / "chat.jsonl"), "max_seq_len": 1024}
    code, _, error = train()
    assert code == 2
    assert "chat.jsonl, line 2: Image features and image tokens do not match" in error


def test_sample_without_the_image_that_a_model_requires(settings, train, tmp_path):
    """BLIP-2's forward pass has no default for images, so that a batch of text alone raised after the first steps."""
    write_run("blip-2", settings, tmp_path)
    code, _, error = train()
    assert code == 2
    assert "chat.jsonl, line 1: has no pixel_values, which Blip2ForConditionalGeneration requires" in error
    assert "line 2" not in error


def test_samples_of_a_model_that_takes_one_image(settings, train, tmp_path):
    """GIT puts the image before the tokens of a row, and raised in the forward pass for text and for two images."""
    write_run("git", settings, tmp_path)
    settings["data"] |= {"packing": False}
    settings["train"] |= {"micro_batch_size": 1}
    code, _, error = train()
    assert code == 2
    assert "chat.jsonl, line 1: has 0 images, and GitForCausalLM takes one in every sample" in error
    assert "line 2" not in error
    assert "chat.jsonl, line 3: has 2 images" in error


def test_config_with_other_token_ids(settings, train, tmp_path):
    """Phi-4 multimodal has the ids in the configs of its encoders, and ignores images without them."""
    try:
        write_checkpoint(tmp_path, "phi4_multimodal")
    except ImportError as error:
        pytest.skip(str(error).strip().splitlines()[0])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"]["image_token_id"] = config["vocab_size"] - 1
    file.write_text(json.dumps(config))
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples(tmp_path, {"image"})))
    settings |= {"task": "vlm", "model": {"config_path": str(tmp_path)}}
    settings["data"] |= {"train_path": str(tmp_path / "chat.jsonl"), "max_seq_len": 1024}
    code, _, error = train()
    assert code == 2
    assert "none of its tokens are those that the model replaces with features" in error


def test_encoder_decoder_raises(settings, train, tmp_path):
    """The encoder of Florence-2 would read the answers."""
    write_checkpoint(tmp_path, "florence2")
    (tmp_path / "chat.jsonl").write_text(json.dumps(talk()) + "\n")
    settings |= {"task": "vlm", "model": {"config_path": str(tmp_path)}}
    settings["data"] |= {"train_path": str(tmp_path / "chat.jsonl"), "max_seq_len": 64, "packing": False}
    code, _, error = train()
    assert code == 2
    assert "its encoder would read the answers" in error


def test_text_for_a_processor_that_requires_images(settings, tmp_path):
    """GOT-OCR's processor rejects text without images, also where only tokens of turns are special."""
    write_checkpoint(tmp_path, "got_ocr2")
    (tmp_path / "chat.jsonl").write_text(json.dumps(talk()) + "\n")
    settings |= {"task": "vlm", "model": {"config_path": str(tmp_path)}}
    settings["data"] |= {"train_path": str(tmp_path / "chat.jsonl"), "max_seq_len": 64}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    trainer = VLMTrainer(load_config([str(file)]), callbacks=[])
    (batch, *_) = trainer.next_micro_batches(iter(trainer.batches))
    assert "pixel_values" not in batch
    assert (batch["labels"] != -100).any()


def test_prefix_language_model_does_not_see_answers(settings, tmp_path):
    """PaliGemma attends in both directions where token_type_ids is 0: before the first trained token alone."""
    write_run("paligemma", settings, tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    trainer = VLMTrainer(load_config([str(file)]), callbacks=[])
    (batch,) = trainer.next_micro_batches(iter(trainer.batches))
    trained, suffix = batch["labels"][0] != -100, batch["token_type_ids"][0]
    starts = batch["cu_seq_lens_q"].tolist()
    answers = 0
    for start, stop in itertools.pairwise(starts):
        own = trained[start:stop].nonzero()
        if len(own):
            first = start + int(own[0])
            assert not suffix[start:first].any()
            assert suffix[first:stop].all()
            answers += 1
    assert answers >= 3
