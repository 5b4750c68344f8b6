"""Task vlm with the processors of many families: text, images and video mixed and packed equal the samples alone."""

import importlib.util
import json

import numpy as np
import pytest
import transformers
import yaml
from PIL import Image
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from opslot.trainer import load_config
from opslot.trainer.vlm import VLMTrainer
from tests.processors import write_checkpoint

QUICK = ("gemma3", "llava_next")
SLOW = (
    "glm4v",
    "idefics3",
    "internvl",
    "llava",
    "llava_onevision",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_vl",
)


def talk(*parts):
    question = [*parts, {"type": "text", "text": "what?"}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "a red circle"}]}


def samples(folder, has_video):
    """Text, one image, two images, and a video."""
    rng = np.random.default_rng(0)
    for number in (1, 2):
        pixels = rng.integers(0, 255, (20 + 4 * number, 28, 3)).astype("uint8")
        Image.fromarray(pixels).save(folder / f"{number}.png")
    first, second = ({"type": "image", "image": f"{number}.png"} for number in (1, 2))
    video = {"type": "video", "video": {"frames": ["1.png", "2.png"] * 2, "fps": 2}}
    return [talk(), talk(first), talk(second, first), *([talk(video)] if has_video else [])]


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_packed_families_equal_unpacked(family, settings, tmp_path):
    has_video = "video_processor" in getattr(transformers, PROCESSOR_MAPPING_NAMES[family]).get_attributes()
    if has_video and importlib.util.find_spec("torchvision") is None:
        pytest.skip(f"the video processor of {family} needs torchvision")
    write_checkpoint(tmp_path, family)
    lines = samples(tmp_path, has_video)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings |= {"task": "vlm", "model": {"config_path": str(tmp_path)}}
    settings["data"] |= {"train_path": str(tmp_path / "chat.jsonl"), "max_seq_len": 1024, "shuffle": False}
    settings["train"] |= {"global_batch_size": len(lines)}
    losses = []
    for packing in (True, False):
        settings["data"]["packing"] = packing
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(settings))
        micro_batch = [] if packing else ["--train.micro_batch_size=1"]
        trainer = VLMTrainer(load_config([str(file), *micro_batch]), callbacks=[])
        batches = trainer.next_micro_batches(iter(trainer.batches))
        assert len(batches) == (1 if packing else len(lines))
        count = sum(map(trainer.count_targets, batches))
        losses.append(sum(trainer.forward(batch, count).loss.item() for batch in batches))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
