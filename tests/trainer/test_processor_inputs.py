"""Samples of task vlm, beside what the processor's own apply_chat_template gives for the same conversation."""

import inspect
import json
import wave
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from opslot._base.labels import IGNORE_INDEX
from opslot.data.multimodal.audio import load_audio
from opslot.data.multimodal.media import Limits, load_image
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.data.multimodal.samples import MultimodalEncoder
from opslot.data.records import split_into_shards
from opslot.models import trained_config
from opslot.models._multimodal.placeholders import PlaceholderCheck
from opslot.trainer.processors import load_processor, multimodal_class
from tests.processors import write_checkpoint
from tests.trainer.test_processors import QUICK, SLOW, kinds_of

OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
# Without a chat template, with inputs for the answers, with features that are counted with the model's code, and with
# an apply_chat_template that takes no image.
OTHER = ("phi4_multimodal", "paligemma", "hunyuan_vl", "got_ocr2")
ONE_AUDIO = ("audioflamingo3", "glmasr", "musicflamingo", "omniasr", "qwen3_asr")
# Arguments of get_rope_index that processors name differently.
ALIASES = {"second_per_grids": "video_second_per_grid", "audio_seqlens": "feature_attention_mask"}


def text(value):
    return {"type": "text", "text": value}


def image(number):
    return {"type": "image", "image": f"{number}.png"}


def audio(name):
    return {"type": "audio", "audio": f"{name}.wav"}


def turns(*contents, system=None):
    """User's and assistant's turns alternately."""
    roles = ("user", "assistant") * len(contents)
    found = [{"role": role, "content": list(parts)} for role, parts in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": [text(system)]}, *found] if system else found


def conversations(kinds, family):
    found = [turns([text("what?")], [text("a")], [text("again?")], [text("a circle")], system="be brief")]
    if "image" in kinds:
        found.append(turns([image(1), text("what?")], [text("a red circle")]))
        found.append(turns([image(1), image(2), text("what?")], [text("a")]))
        late = [text("it "), image(2), text(" is "), image(3)]
        found.append(turns([text("hi")], [text("a red")], late, [text("is it?")], system="be brief"))
    if "audio" in kinds:
        found.append(turns([audio("a"), text("what?")], [text("a circle")]))
        if family not in ONE_AUDIO:
            found.append(turns([audio("a"), text(" it "), audio("b"), text("what?")], [text("a")]))
    if {"audio", "image"} <= kinds:
        found.append(turns([image(1), audio("b"), text("?")], [text("a")], [audio("a"), image(2)], [text("red")]))
    return found


def write_media(folder):
    rng = np.random.default_rng(0)
    for number, size in enumerate([(24, 28), (60, 33), (100, 40)], 1):
        Image.fromarray(rng.integers(0, 255, (*size, 3)).astype("uint8")).save(folder / f"{number}.png")
    for name, count, rate in [("a", 4001, 16_000), ("b", 12_345, 44_100)]:
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes((8000 * np.sin(np.arange(count) / 9)).astype("<i2").tobytes())


def loaded(messages, folder, rate):
    """The messages with decoded media."""
    load = {"image": lambda name: load_image(name, folder, Limits()), "audio": lambda n: load_audio(n, folder, rate)}
    return [
        {
            **message,
            "content": [
                {**part, part["type"]: load[part["type"]](part[part["type"]])} if part["type"] in load else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def checkpoint(family, folder):
    """An encoder of a tiny checkpoint, and its processor; skips where a package is missing."""
    try:
        if "video" in kinds_of(family):
            pytest.importorskip("torchvision")
        write_checkpoint(folder, family)
        processor, other = load_processor(folder), load_processor(folder)
    except ImportError as error:
        pytest.skip(str(error).strip().splitlines()[0])
    config = AutoConfig.from_pretrained(folder)
    name = multimodal_class(config)
    if family in OMNI:
        config = trained_config(config, name)
        name = multimodal_class(config)
    processor.tokenizer.chat_template = processor.chat_template
    positions = RopePositions(config, name)
    if getattr(other, "return_mm_token_type_ids", None) is False:
        # Cosmos 3 Edge's model needs them.
        other.return_mm_token_type_ids = True
    check = PlaceholderCheck(positions)
    return MultimodalEncoder(processor, config, positions, 8192, check_features=check), other


@pytest.mark.quick("gemma3", "llava_next", "qwen3_vl")
@pytest.mark.parametrize("family", [name for name in (*QUICK, *SLOW, *OMNI) if name not in OTHER])
def test_samples_equal_apply_chat_template(family, tmp_path):
    encoder, processor = checkpoint(family, tmp_path)
    write_media(tmp_path)
    rate = getattr(encoder.loader.component("audio"), "sampling_rate", None)
    records = conversations(kinds_of(family), family)
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in records))
    problems = []
    encoder.inspect(file, "auto", problems)
    shards = split_into_shards([file], encoder.columns, 1 << 20, problems)
    documents = [each for shard in shards for batch in encoder.encode(shard, problems, Counter()) for each in batch]
    assert not problems
    for messages, document in zip(records, documents, strict=True):
        expected = processor.apply_chat_template(
            loaded(messages, tmp_path, rate), tokenize=True, return_dict=True, return_tensors="pt"
        )
        ids = torch.from_numpy(document.tokens["token"].astype("int64"))
        assert ids.tolist() == expected["input_ids"][0].tolist()
        trained = ids[torch.from_numpy(document.tokens["label"].astype("int64")) != IGNORE_INDEX]
        answers = [message["content"][0]["text"] for message in messages if message["role"] == "assistant"]
        assert processor.tokenizer.decode(trained) == "".join(f"{answer}<|im_end|>" for answer in answers)
        found = encoder.features(document.extra, ids)
        if (mask := found.get("feature_attention_mask")) is not None:
            # Without the padding to the longest audio that the processor takes.
            for name in ("feature_attention_mask", "input_features"):
                assert not mask.shape[-1] > expected[name].shape[-1]
                expected[name] = expected[name][..., : mask.shape[-1]]
        positions = found.pop("position_ids")
        left_out = {"input_ids", "attention_mask", "mm_token_type_ids"}
        assert found.keys() - left_out == expected.keys() - left_out
        for name in found.keys() - left_out:
            value = expected[name][0] if found[name].dim() < expected[name].dim() else expected[name]
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
        if (module := encoder.positions._module) is not None:
            names = {name: ALIASES.get(name, name) for name in inspect.signature(module.get_rope_index).parameters}
            given = {name: expected[source] for name, source in names.items() if source in expected}
            if "audio_seqlens" in given:
                given["audio_seqlens"] = given["audio_seqlens"].sum(-1)
            assert torch.equal(positions, module.get_rope_index(**given)[0][:, 0].long())


def test_prompt_with_an_image_and_a_video_that_are_marked_with_one_token(tmp_path):
    """Transformers' class takes images or videos in a batch."""
    encoder, _ = checkpoint("glm4v", tmp_path)
    write_media(tmp_path)
    video = {"type": "video", "video": {"frames": ["1.png", "2.png"], "fps": 2}}
    inputs = encoder.prompt([{"role": "user", "content": [image(3), video, text("what?")]}], tmp_path)
    assert "pixel_values_videos" not in inputs
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    assert model.generate(**inputs, max_new_tokens=2, min_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2
