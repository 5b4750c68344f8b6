"""Samples with images, video and audio: forms, labels, positions, features and what is wrong with them."""

import base64
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, PreTrainedConfig

from opslot._base.errors import ConfigError, DataError
from opslot._base.labels import IGNORE_INDEX
from opslot.data.encoder import SampleError
from opslot.data.multimodal import collation, loading, processor_call
from opslot.data.multimodal.encoder_cost import AudioRows, EncoderCost
from opslot.data.multimodal.loading import MediaLoader
from opslot.data.multimodal.media import Limits, from_bytes, load_image
from opslot.data.multimodal.parts import separate_media
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.data.multimodal.samples import MultimodalEncoder
from opslot.data.records import split_into_shards
from opslot.trainer.processors import load_processor
from tests.multimodal import draw, talk, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("vlm"))


@pytest.fixture
def encoder_of(model):
    def make(**options):
        config = AutoConfig.from_pretrained(model)
        positions = RopePositions(config, "Qwen3VLForConditionalGeneration")
        return MultimodalEncoder(load_processor(model), config, positions, options.pop("max_seq_len", 128), **options)

    return make


def encode(encoder, file):
    problems, counts = [], Counter()
    encoder.inspect(file, "auto", problems)
    shards = [] if problems else split_into_shards([file], encoder.columns, 1 << 20, problems)
    found = [doc for shard in shards for batch in encoder.encode(shard, problems, counts) for doc in batch]
    return found, problems, counts


def write(folder, *records):
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def png(folder, number=1):
    return draw(folder / f"{number}.png", number)


def tokens_of(document):
    return torch.from_numpy(document.tokens["token"].astype("int64"))


def trained_text(encoder, document):
    labels = document.tokens["label"]
    return encoder.tokenizer.decode(labels[labels != IGNORE_INDEX].tolist())


def test_labels_are_those_of_the_assistant(encoder_of, tmp_path):
    encoder = encoder_of()
    messages = [*talk(png(tmp_path), answer="one"), *talk(png(tmp_path, 2), png(tmp_path, 3), answer="two")]
    (document,), problems, _ = encode(encoder, write(tmp_path, {"messages": messages}))
    assert not problems
    assert trained_text(encoder, document) == "one<|im_end|>two<|im_end|>"
    features = encoder.features(document.extra, tokens_of(document))
    assert features["image_grid_thw"].shape == (3, 3)
    assert len(features["pixel_values"]) == int(features["image_grid_thw"].prod(-1).sum())
    # The second image is placed below and beside its first patch, and text continues after the larger of both.
    assert features["position_ids"].shape == (3, len(document.tokens))
    assert len(features["position_ids"].unique(dim=0)) > 1


def forms(folder):
    file = png(folder)
    data = file.read_bytes()
    pixels = np.asarray(Image.open(file)).tolist()
    coded = base64.b64encode(data).decode()
    return {
        "path": {"type": "image", "image": file.name},
        "absolute path": {"type": "image", "path": str(file)},
        "file URL": {"type": "image", "url": f"file://{file}"},
        "base64": {"type": "image", "base64": coded},
        "data URI": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded}"}},
        "array": {"type": "image", "array": pixels},
        "column": {"type": "image"},
    }


@pytest.mark.parametrize("form", ["absolute path", "file URL", "base64", "data URI", "array", "column"])
def test_forms_of_an_image_are_equal(encoder_of, tmp_path, form):
    encoder = encoder_of()
    parts = forms(tmp_path)
    found = []
    for part in (parts["path"], parts[form]):
        content = [part, {"type": "text", "text": "what?"}]
        record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}
        if form == "column" and part is parts[form]:
            record["images"] = ["1.png"]
        (document,), problems, _ = encode(encoder, write(tmp_path, record))
        assert not problems
        found.append(encoder.features(document.extra, tokens_of(document))["pixel_values"])
    torch.testing.assert_close(*found)


def test_instruction_with_an_image(encoder_of, tmp_path):
    encoder, images = encoder_of(), [png(tmp_path).name]
    record = {"instruction": "<image>what?", "input": "In a word.", "output": "one", "images": images}
    question = {"role": "user", "content": "<image>what?\nIn a word."}
    messages = {"messages": [question, {"role": "assistant", "content": "one"}], "images": images}
    (found,), (expected,) = (encode(encoder, write(tmp_path, each))[0] for each in (record, messages))
    assert np.array_equal(found.tokens, expected.tokens)
    assert encoder.media_tokens[0] in found.tokens["token"]


def test_texts_with_an_image(encoder_of, tmp_path):
    encoder, images = encoder_of(), [png(tmp_path).name]
    record = {"images": images, "texts": [{"user": "what?", "assistant": "one"}, {"user": "sure?", "assistant": "yes"}]}
    turns = [("user", "<image>what?"), ("assistant", "one"), ("user", "sure?"), ("assistant", "yes")]
    messages = {"messages": [{"role": role, "content": text} for role, text in turns], "images": images}
    (found,), (expected,) = (encode(encoder, write(tmp_path, each))[0] for each in (record, messages))
    assert np.array_equal(found.tokens, expected.tokens)
    assert encoder.media_tokens[0] in found.tokens["token"]


@pytest.mark.parametrize("in_template", [False, True])
@pytest.mark.parametrize("images", [0, 2])
def test_special_tokens_are_those_of_the_processor(encoder_of, tmp_path, images, in_template):
    """The template of LLaVA leaves the first token to the tokenizer, which adds none to text that has it."""
    encoder = encoder_of()
    tokenizer, processor = encoder.tokenizer, encoder.processor
    tokenizer.add_special_tokens({"bos_token": "<|vision_start|>"})
    bos = ("<|vision_start|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    if in_template:
        tokenizer.chat_template = processor.chat_template = "{{ bos_token }}" + processor.chat_template
    messages = talk(*[str(png(tmp_path, number)) for number in range(images)])
    (document,), problems, _ = encode(encoder, write(tmp_path, {"messages": messages}))
    assert not problems
    if images:
        for part in messages[0]["content"][:-1]:
            part["image"] = load_image(part["image"], tmp_path, Limits())
    else:
        # Transformers takes all messages with strings, or all with parts.
        messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    expected = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert expected["input_ids"][0, 0] == bos[1]
    assert tokens_of(document).tolist() == expected["input_ids"][0].tolist()
    assert trained_text(encoder, document) == "a red circle<|im_end|>"
    found = encoder.features(document.extra, tokens_of(document))
    for name in ("pixel_values", "image_grid_thw"):
        assert (name in found) == (name in expected) == bool(images)
        assert not images or torch.equal(found[name], expected[name])


def test_tags_and_columns(encoder_of, tmp_path):
    encoder = encoder_of()
    png(tmp_path)
    turns = [{"from": "human", "value": "<image>what is it?"}, {"from": "gpt", "value": "a <image> tag"}]
    (document,), problems, _ = encode(encoder, write(tmp_path, {"conversations": turns, "images": ["1.png"]}))
    assert not problems
    assert trained_text(encoder, document) == "a <image> tag<|im_end|>"


def test_list_of_images_in_the_column_image(encoder_of, tmp_path):
    """As in the data of LLaVA-NeXT and Qwen-VL."""
    names = [draw(tmp_path / f"{number}.png", number).name for number in range(2)]
    turns = [{"from": "human", "value": "<image>\n<image>what is it?"}, {"from": "gpt", "value": "a red circle"}]
    file = write(tmp_path, {"image": names, "conversations": turns})
    (document,), problems, _ = encode(encoder_of(), file)
    assert not problems
    assert [source for _, source in from_bytes(document.extra)["media"]] == names


def test_parts_that_give_the_number_of_an_image(encoder_of, tmp_path):
    """As in HuggingFaceH4's llava-instruct-mix, where Arrow adds the key to the parts of text too."""
    names = [draw(tmp_path / f"{number}.png", number).name for number in range(2)]
    text = {"type": "text", "text": "what is it?", "index": None}
    parts = [{"type": "image", "text": None, "index": 1}, text, *({"type": "image", "index": i} for i in (0, 1))]
    answer = {"role": "assistant", "content": "a red circle"}
    record = {"images": names, "messages": [{"role": "user", "content": parts}, answer]}
    (document,), problems, _ = encode(encoder_of(), write(tmp_path, record))
    assert not problems
    assert [source for _, source in from_bytes(document.extra)["media"]] == ["1.png", "0.png", "1.png"]
    parts[0]["index"] = 2
    _, (problem,), _ = encode(encoder_of(), write(tmp_path, record))
    assert "index 2 is not one of the 2 media of the column" in problem


IMAGE = {"type": "image"}


@pytest.mark.parametrize(
    ("content", "images", "text", "counted"),
    [
        # As strings, and text parts with tags beside a column.
        ([{"type": "text", "text": "<image> or <image>?"}], ["1.png", "2.png"], "[image] or [image]?", {}),
        # A tag in a text beside parts of the column.
        ([IMAGE, {"type": "text", "text": "what is <image>?"}], ["1.png"], "[image]what is <image>?", {"tag": 1}),
        # As TRL's data.
        ("what is it?", ["1.png", "2.png"], "[image][image]what is it?", {"unnamed media": 1}),
        ([{"type": "text", "text": "what is it?"}], ["1.png"], "[image]what is it?", {"unnamed media": 1}),
        # Of a table of strings.
        ("<image>what is it?", '["1.png"]', "[image]what is it?", {}),
        # Text beside samples with images.
        ("what is it?", [None], "what is it?", {}),
        ("what is it?", "", "what is it?", {}),
    ],
)
def test_media_of_columns(encoder_of, tmp_path, content, images, text, counted):
    for number in (1, 2):
        draw(tmp_path / f"{number}.png", number)
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]
    answer = "a red circle" if "unnamed media" in counted else "a <image> tag"
    turns.append({"role": "assistant", "content": answer})
    encoder = encoder_of()
    names = {"messages": (turns,), "prompt": (turns[:2], turns[2:])}
    for form, columns in names.items():
        record = dict(zip((form, "completion"), columns, strict=False))
        (document,), problems, counts = encode(encoder, write(tmp_path, {**record, "images": images}))
        assert not problems
        assert counts == counted
        description = from_bytes(document.extra)
        shown = description["text"].replace("<|vision_start|><|image_pad|><|vision_end|>", "[image]")
        assert f"user\n{text}<|im_end|>" in shown
        assert [source for _, source in description["media"]] == ["1.png", "2.png"][: text.count("[image]")]
        assert trained_text(encoder, document) == f"{answer}<|im_end|>"


def test_rate_of_frames_in_qwen_vl_utils():
    part = {"type": "video", "video": ["1.png", "2.png"], "sample_fps": 2.0}
    _, media, _ = separate_media({"messages": [{"role": "user", "content": [part]}]}, "messages")
    assert media == [("video", {"array": ["1.png", "2.png"], "fps": 2.0})]


def test_more_tags_in_a_text_part_than_images(encoder_of, tmp_path):
    turns = [{"role": "user", "content": [{"type": "text", "text": "<image><image>?"}]}, *talk()[1:]]
    _, (problem,), _ = encode(encoder_of(), write(tmp_path, {"messages": turns, "images": ["1.png"]}))
    assert "the messages have more <image> than the column images" in problem


def test_columns_without_a_conversation_name_the_task(encoder_of, tmp_path):
    _, (problem,), _ = encode(encoder_of(), write(tmp_path, {"query": "what?", "images": []}))
    assert "it has query, images, and task vlm needs messages" in problem


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        (("image", "caption"), "; make caption an answer: a column messages with a user's turn"),
        (("file_name", "text"), "; make text an answer: a column messages with a user's turn"),
        (("image", "question", "answer"), "; rename question to prompt and answer to completion"),
        (("image", "label"), "or texts"),
    ],
    ids=str,
)
def test_columns_without_a_conversation_get_a_hint(encoder_of, tmp_path, columns, fix):
    _, (problem,), _ = encode(encoder_of(), write(tmp_path, dict.fromkeys(columns, "x")))
    assert fix in problem


def test_tag_beside_a_column_of_another_name_raises(encoder_of, tmp_path):
    """Else the model would be trained without its images."""
    png(tmp_path)
    file = write(tmp_path, {"image_path": "1.png", "messages": talk(question="<image>what is it?")})
    _, (problem,), _ = encode(encoder_of(), file)
    assert "has no column images, image, videos, video, audios, audio; rename image_path to images" in problem
    file = write(tmp_path, {"image_path": "1.png", "messages": talk("1.png")})
    documents, problems, counts = encode(encoder_of(), file)
    assert (len(documents), problems, counts) == (1, [], {})


def test_path_in_a_text_is_counted(encoder_of, tmp_path):
    """As the first Qwen-VL names its images."""
    file = write(tmp_path, {"messages": talk(question="Picture 1: <img>1.png</img>what is it?")})
    _, problems, counts = encode(encoder_of(), file)
    assert (problems, counts) == ([], {"tag": 1})


def test_tag_without_a_column_is_counted(encoder_of, tmp_path):
    """The column may have an unknown name, or the text may be about HTML."""
    draw(tmp_path / "1.png", 1)
    turns = [{"role": "user", "content": "<image>what is it?"}, {"role": "assistant", "content": "a red circle"}]
    file = write(tmp_path, {"photo": "1.png", "messages": turns}, {"images": ["1.png"], "messages": turns})
    documents, problems, counts = encode(encoder_of(), file)
    assert not problems
    assert len(documents) == 2
    assert counts == {"tag": 1}


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image", "image": "1.png", "max_pixels": 1000}, "has max_pixels, which is not applied"),
        ({"type": "video", "video": "1.mp4", "video_start": 1.0}, "has video_start, which is not applied"),
        ({"type": "video", "video": "1.mp4", "num_frames": 4}, "has num_frames, which is not applied"),
        ({"type": "video", "video": {"path": "1.mp4", "nframes": 4}}, "has nframes, which is not applied"),
    ],
)
def test_setting_of_a_part_that_is_not_applied(encoder_of, tmp_path, part, problem):
    draw(tmp_path / "1.png", 1)
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a red circle"}]
    file = write(tmp_path, {"messages": turns})
    _, (found,), _ = encode(encoder_of(), file)
    assert problem in found


@pytest.mark.parametrize("question", ["<video>what?", "what?"])
def test_setting_of_a_source_in_a_column_that_is_not_applied(encoder_of, tmp_path, question):
    sources = [{"path": "1.mp4", "num_frames": 4}]
    file = write(tmp_path, {"messages": talk(question=question), "videos": sources})
    _, (found,), _ = encode(encoder_of(), file)
    assert "the source of video has num_frames, which is not applied; remove it (for all: data.max_frames)" in found


def test_parquet_with_bytes(encoder_of, tmp_path):
    encoder = encoder_of()
    data = png(tmp_path).read_bytes()
    rows = [{"messages": talk(question="<image>what?"), "images": [{"bytes": data, "path": None}]} for _ in range(3)]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    (tmp_path / "1.png").unlink()
    documents, problems, _ = encode(encoder, file)
    assert not problems
    assert len(documents) == 3
    assert encoder.features(documents[2].extra, tokens_of(documents[2]))["image_grid_thw"].shape == (1, 3)


def bad_samples(folder):
    (folder / "bad.png").write_bytes(b"\x89PNG not an image")
    whole = png(folder).read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    audio = {"type": "audio", "audio": "a.wav"}
    return {
        "bad.png does not decode": talk("bad.png"),
        "cut.png does not decode": talk("cut.png"),
        "gone.png cannot be read": talk("gone.png"),
        "https://a.b/c.png is not downloaded": talk("https://a.b/c.png"),
        "has audio, which Qwen3VLProcessor cannot process": [
            {"role": "user", "content": [audio]},
            {"role": "assistant", "content": "a"},
        ],
        "a message has <|image_pad|>, which the chat template adds for each image: write <image> instead": talk(
            "1.png", question="<|image_pad|> what?"
        ),
        "it has <image_00>; give a list of sources, and <image> in the text for each": [
            {"role": "user", "content": [{"type": "image", "image": {"<image_00>": "1.png"}}]},
            {"role": "assistant", "content": "a"},
        ],
        "has no source": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}],
        "unknown part type 'picture'": [
            {"role": "user", "content": [{"type": "picture"}]},
            {"role": "assistant", "content": "a"},
        ],
    }


@pytest.mark.parametrize(
    "message",
    [
        "bad.png does not decode",
        "cut.png does not decode",
        "gone.png cannot be read",
        "https://a.b/c.png is not downloaded",
        "has audio, which Qwen3VLProcessor cannot process",
        "a message has <|image_pad|>, which the chat template adds for each image: write <image> instead",
        "it has <image_00>; give a list of sources, and <image> in the text for each",
        "has no source",
        "unknown part type 'picture'",
    ],
)
def test_bad_sample(encoder_of, tmp_path, message):
    messages = bad_samples(tmp_path)[message]
    file = write(tmp_path, {"messages": talk("1.png")}, {"messages": messages})
    documents, (problem,), _ = encode(encoder_of(), file)
    assert problem.startswith(f"{file}, line 2: ")
    assert message in problem
    documents, problems, counts = encode(encoder_of(on_bad_sample="skip"), file)
    assert not problems
    assert len(documents) == 1
    assert counts == {"malformed": 1}


QUESTION = {"role": "user", "content": "what?"}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "the text of a part must be a string, found a int (5)",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "content": "x"}]}],
            "type text has no text; it has type, content",
        ),
        ([{"role": "user", "content": [{"type": "image", "image": ""}]}], "its path is empty"),
        ([{"role": "user", "content": [{"image": "1.png", "text": "what?"}]}], "a part of type image has text too"),
        ([{"role": "user", "content": [{"type": "video", "video": "1.mp4", "image": "1.png"}]}], "has image too"),
        ([QUESTION, {"role": "assistant", "content": "", "tool_calls": 5}], "tool_calls must be a list, found a int"),
        (
            [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": " "}]}],
            "the assistant's turn is empty",
        ),
    ],
)
def test_messages_of_wrong_types(encoder_of, tmp_path, messages, problem):
    file = write(tmp_path, {"messages": [*messages, *talk()]})
    _, (found,), _ = encode(encoder_of(), file)
    assert found.startswith(f"{file}, line 1: ")
    assert problem in found


def test_skipped_samples_are_logged(encoder_of, tmp_path, caplog):
    """The first of each process, with the reason."""
    file = write(tmp_path, {"messages": talk(str(png(tmp_path)))}, *[{"messages": talk("gone.png")}] * 12)
    _, problems, counts = encode(encoder_of(on_bad_sample="skip"), file)
    assert (problems, counts) == ([], {"malformed": 12})
    logged = [message for message in caplog.messages if message.startswith("left out (data.on_bad_sample: skip): ")]
    assert len(logged) == 10
    assert f"{file}, line 2: gone.png cannot be read" in logged[0]


def test_video_without_frames_is_skipped(encoder_of, tmp_path):
    video = [{"role": "user", "content": [{"type": "video", "frames": []}]}, {"role": "assistant", "content": "a"}]
    file = write(tmp_path, {"messages": talk(str(png(tmp_path)))}, {"messages": video})

    def encoder(**options):
        made = encoder_of(**options)
        # Transformers has none without torchvision.
        made.processor.video_processor = object()
        return made

    _, (problem,), _ = encode(encoder(), file)
    assert problem.startswith(f"{file}, line 2: the video in the record (a list) has no frames")
    documents, problems, counts = encode(encoder(on_bad_sample="skip"), file)
    assert (len(documents), problems, counts) == (1, [], {"malformed": 1})


def test_text_with_a_placeholder_and_no_image(encoder_of, tmp_path):
    file = write(tmp_path, {"messages": talk(question="<|image_pad|> what?")})
    _, (problem,), _ = encode(encoder_of(), file)
    assert "Found 1 <|image_pad|> tokens in the text but no images were passed" in problem


def test_more_images_than_placeholders(encoder_of, tmp_path):
    png(tmp_path)
    file = write(tmp_path, {"messages": talk(question="<image>?"), "images": ["1.png", "1.png"]})
    _, (problem,), _ = encode(encoder_of(), file)
    assert "1 more of image than the messages use" in problem


@pytest.mark.parametrize("images", [["1.png"], []])
def test_fewer_images_than_placeholders(encoder_of, tmp_path, images):
    png(tmp_path)
    question = "<image> or " * len(images) + "<image>?"
    for record in ({"messages": talk(question=question)}, {"prompt": question, "completion": "a"}):
        _, (problem,), _ = encode(encoder_of(), write(tmp_path, record | {"images": images}))
        assert "the messages have more <image> than the column images" in problem
    _, problems, _ = encode(encoder_of(), write(tmp_path, {"messages": talk(question="an <image> tag")}))
    assert not problems


@pytest.mark.parametrize(
    ("merge", "problem"),
    [(4, "4 x 4 patches"), (3, "do not divide by the merge size 3 of the model"), (1, "placeholders in the text, but")],
)
def test_processor_of_another_merge_size_raises(encoder_of, tmp_path, merge, problem):
    encoder = encoder_of()
    encoder.config.vision_config.spatial_merge_size = merge
    image = Image.new("RGB", (48, 32) if merge == 4 else (32, 32))
    image.save(tmp_path / "1.png")
    _, (found,), _ = encode(encoder, write(tmp_path, {"messages": talk("1.png")}))
    assert found.startswith(f"{tmp_path / 'a.jsonl'}, line 1: ")
    assert problem.replace("4 x 4", "4 x 6") in found
    assert "the processor that ships with the checkpoint" in found


def test_images_without_a_token_between_them_raise(encoder_of, tmp_path, monkeypatch):
    encoder = encoder_of()

    def rejects(*args):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(RopePositions, "__call__", rejects)
    png(tmp_path)
    _, (found,), _ = encode(encoder, write(tmp_path, {"messages": talk("1.png")}))
    assert "line 1: the model computes no position ids for it: shape mismatch" in found
    assert "separate its images and videos by a token" in found


def test_frames_of_videos_marked_as_images():
    def patches(*grids):
        count = sum(t * h * w for t, h, w in grids)
        return torch.arange(count * 2.0).view(count, 2), torch.tensor(grids)

    images, image_grid = patches((1, 2, 2), (1, 4, 2))
    videos, video_grid = patches((2, 2, 4))
    inputs = {"pixel_values": images, "image_grid_thw": image_grid, "mm_token_type_ids": torch.tensor([[1, 0, 2]])}
    inputs |= {"pixel_values_videos": -videos, "video_grid_thw": video_grid}
    found = processor_call.videos_as_images(inputs, ["image", "video", "image"])
    assert found.keys() == {"pixel_values", "image_grid_thw", "mm_token_type_ids"}
    assert found["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 4], [1, 4, 2]]
    assert found["mm_token_type_ids"].tolist() == [[1, 0, 1]]
    assert torch.equal(found["pixel_values"], torch.cat([images[:4], -videos, images[4:]]))


def test_videos_marked_as_images_have_the_features_of_videos():
    from opslot.verify.random_model import random_model
    from opslot.verify.tiny import tiny_config

    model = random_model(tiny_config("glm4v")).model
    grid = torch.tensor([[2, 4, 2], [1, 2, 2]])
    pixels = torch.rand(20, model.visual.patch_embed.proj.weight[0].numel())
    found = processor_call.videos_as_images({"pixel_values_videos": pixels, "video_grid_thw": grid}, ["video", "video"])
    images = model.get_image_features(**found).pooler_output
    videos = model.get_video_features(pixels, grid).pooler_output
    assert torch.equal(torch.cat(images), torch.cat(videos))


def test_token_ids_in_the_configs_of_encoders(encoder_of):
    """As in Phi-4 multimodal's config; samples are not cut at such tokens."""
    encoder = encoder_of()
    encoder.config = PreTrainedConfig()
    encoder.config.vision_config = PreTrainedConfig(image_token_id=7)
    encoder.config.audio_config = PreTrainedConfig(audio_token_id=8)
    assert encoder.media_tokens == [7, 8]


def test_image_without_a_token_that_the_model_replaces(encoder_of, tmp_path):
    encoder = encoder_of()
    encoder.config.image_token_id = encoder.config.text_config.vocab_size - 1
    draw(tmp_path / "1.png", 1)
    _, (problem,), _ = encode(encoder, write(tmp_path, {"messages": talk("1.png")}))
    assert "none of its tokens are those that the model replaces with features" in problem


def test_long_sample_is_not_malformed(encoder_of, tmp_path):
    """`data.on_bad_sample: skip` leaves out malformed samples alone; `data.long_samples` decides about long ones."""
    png(tmp_path)
    file = write(tmp_path, {"messages": talk("1.png")})
    documents, (problem,), counts = encode(encoder_of(max_seq_len=8, on_bad_sample="skip"), file)
    assert (documents, counts) == ([], {})
    assert "more than data.max_seq_len=8; increase it, lower data.max_pixels, or set data.long_samples" in problem


def test_long_samples(encoder_of, tmp_path):
    png(tmp_path)
    late = [*talk(question="x" * 60, answer="y"), *talk("1.png")]
    file = write(tmp_path, {"messages": talk("1.png", answer="z" * 90)}, {"messages": late})
    documents, _, counts = encode(encoder_of(max_seq_len=64, long_samples="truncate"), file)
    assert [len(document.tokens) for document in documents] == [64]
    assert counts == {"truncated": 1, "too long": 1}
    (document,) = documents
    assert encoder_of().features(document.extra, tokens_of(document))["position_ids"].shape == (3, 64)


def test_audio_tracks_are_passed_in_the_order_of_the_text(encoder_of, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_video", lambda source, *_: f"video {source}")
    monkeypatch.setattr(loading, "load_audio", lambda source, *_: f"audio {source}")
    tracks = {"a": "track a", "b": "track b", "silent": None}
    monkeypatch.setattr(loading, "load_audio_track", lambda source, *_: tracks[source])
    encoder = encoder_of()
    encoder.loader.use_audio_in_video = True
    encoder.processor.video_processor = object()
    encoder.processor.feature_extractor = type("Extractor", (), {"sampling_rate": 16_000})

    def load(*used):
        return encoder.loader.load(used, tmp_path)

    found, videos = load(("video", "a"), ("audio", "x"), ("video", "b"))
    assert videos == [0, None, 1]
    assert found["audio"] == ["track a", "audio x", "track b"]
    assert found["video"] == ["video a", "video b"]
    assert not load(("video", "silent"))[1]
    with pytest.raises(SampleError, match="others have none"):
        load(("video", "a"), ("video", "silent"))
    # `generate` computes positions as training does.
    monkeypatch.setattr(encoder, "_process", lambda *_: ({"input_ids": torch.zeros(1, 2)}, ""))
    turns = [{"role": "user", "content": [{"type": "video", "video": "a"}, {"type": "text", "text": "what?"}]}]
    assert encoder.prompt(turns, tmp_path)["use_audio_in_video"] is True
    turns[0]["content"][0]["video"] = "silent"
    assert "use_audio_in_video" not in encoder.prompt(turns, tmp_path)


def test_processor_without_audio_of_videos_raises(model):
    with pytest.raises(ConfigError, match="Qwen3VLProcessor does not take the audio of videos"):
        MediaLoader(load_processor(model), use_audio_in_video=True)


def test_relative_paths_start_in_the_folder_of_media(model, encoder_of, tmp_path):
    folder = tmp_path / "images"
    (folder / "train").mkdir(parents=True)
    draw(folder / "train" / "1.png", 1)
    file = write(tmp_path, {"messages": talk("train/1.png", answer="one")})
    assert not encode(encoder_of(), file)[0]
    loader = MediaLoader(load_processor(model), media_dir=str(folder))
    encoder = encoder_of(loader=loader)
    (document,), problems, _ = encode(encoder, file)
    assert not problems
    assert "pixel_values" in encoder.features(document.extra, tokens_of(document))
    assert encoder.identity()["data.media_dir"] == str(folder)
    assert "data.media_dir" not in encoder_of().identity()


def test_missing_folder_of_media_raises(model, tmp_path):
    with pytest.raises(ConfigError, match=r"data.media_dir: .*missing is not a folder"):
        MediaLoader(load_processor(model), media_dir=str(tmp_path / "missing"))


def test_token_types_of_a_processor_that_returns_none_by_default(encoder_of, tmp_path, monkeypatch):
    """As Cosmos 3 Edge's, whose model computes positions from them."""
    encoder = encoder_of()
    if not hasattr(encoder.processor, "return_mm_token_type_ids"):
        pytest.skip("Transformers has had the attribute since 5.23")
    file = write(tmp_path, {"messages": talk(png(tmp_path))})
    (expected,), _, _ = encode(encoder, file)
    positions = encoder.features(expected.extra, tokens_of(expected))["position_ids"]
    monkeypatch.setattr(type(encoder.processor), "return_mm_token_type_ids", False)
    (document,), problems, _ = encode(encoder, file)
    assert not problems
    assert torch.equal(encoder.features(document.extra, tokens_of(document))["position_ids"], positions)


def test_cost_grows_with_the_image(model):
    cost = EncoderCost(AutoConfig.from_pretrained(model))
    small = cost({"image_grid_thw": torch.tensor([[1, 4, 4]])})
    two = cost({"image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])})
    large = cost({"image_grid_thw": torch.tensor([[1, 8, 4]])})
    assert two == pytest.approx(2 * small)
    assert large > two
    assert cost({}) == 0


def test_cost_of_windows_is_that_of_their_pairs():
    config = AutoConfig.for_model("qwen2_5_vl")
    tower = config.vision_config
    patches = 64 * 64
    cost = EncoderCost(config)({"image_grid_thw": torch.tensor([[1, 64, 64]])})
    full, window = len(tower.fullatt_block_indexes), (tower.window_size // tower.patch_size) ** 2
    seen = (full * patches + (tower.depth - full) * window) / tower.depth
    assert cost == pytest.approx(patches * EncoderCost(config).per_row("vision") * (1 + seen / (6 * tower.hidden_size)))


@pytest.mark.parametrize("shape", [(1, 8, 400), (1, 400, 8)], ids=["mels first", "frames first"])
def test_cost_of_audio_is_that_of_its_rows(shape):
    config = AutoConfig.for_model("qwen2_audio", audio_config={"num_mel_bins": 8})
    width = config.audio_config.d_model
    cost = EncoderCost(config, AudioRows(0.25, None), SimpleNamespace(model_input_names=["features", "mask"]))
    whole = cost({"features": torch.zeros(shape), "mask": torch.zeros(1, 400)})
    assert whole == pytest.approx(400 * cost.per_row("audio") * (1 + 100 / (6 * width)))
    assert cost({"input_features": torch.zeros(shape)}) == 0
    windows = EncoderCost(config, AudioRows(0.25, 10))
    inputs = {"input_features": torch.zeros(shape), "feature_attention_mask": torch.arange(400)[None] < 200}
    assert windows(inputs) == pytest.approx(200 * cost.per_row("audio") * (1 + 10 / (6 * width)))


def test_cost_of_a_waveform_is_that_of_its_placeholders():
    config = AutoConfig.for_model("qwen2_audio")
    cost = EncoderCost(config, None, SimpleNamespace(model_input_names=["input_values"]))
    inputs = {"input_values": torch.zeros(1, 16_000), "input_ids": torch.tensor([[1, *[config.audio_token_id] * 25]])}
    assert cost(inputs) == pytest.approx(25 * 2 * cost.per_row("audio") * (1 + 25 / (6 * config.audio_config.d_model)))


@pytest.mark.parametrize(
    "inputs",
    [
        {"pixel_values_videos": torch.zeros(1, 2, 3, 16, 16)},
        {"pixel_values": torch.zeros(2, 3, 16, 16)},
        {"pixel_values": torch.zeros(2, 4, 192)},
    ],
    ids=["frames", "images", "patches"],
)
def test_cost_of_images_without_a_grid(model, inputs):
    cost = EncoderCost(AutoConfig.from_pretrained(model))
    grid = {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])}
    assert cost(inputs) == pytest.approx(cost(grid))


def test_features_are_joined_in_shared_memory_by_processes_of_the_loader(monkeypatch):
    parts = [torch.rand(2, 3, 4), torch.rand(5, 2, 4), torch.rand(0, 3, 4)]
    expected = collation._joined(parts)
    assert expected.shape == (7, 3, 4)
    assert torch.equal(expected[2:, :2], parts[1])
    monkeypatch.setattr(collation, "get_worker_info", object)
    joined = collation._joined(parts)
    assert joined.is_shared()
    assert torch.equal(joined, expected)
    assert torch.equal(collation._joined([parts[2]]), parts[2])


@pytest.mark.parametrize("in_worker", [False, True])
def test_floating_point_features_are_joined_in_a_dtype(monkeypatch, in_worker):
    monkeypatch.setattr(collation, "get_worker_info", lambda: object() if in_worker else None)
    parts = [torch.rand(2, 3), torch.rand(5, 3)]
    for given in (parts, parts[:1]):
        joined = collation._joined(given, torch.bfloat16)
        assert joined.is_shared() == in_worker
        assert torch.equal(joined, torch.cat(given).bfloat16())
        numbers = collation._joined([torch.arange(3)] * len(given), torch.bfloat16)
        assert numbers.dtype == torch.int64


class GivenFeatures:
    """A processor's outputs for samples, in their order, of a model with one axis of positions."""

    audio_mask = None

    def __init__(self, encoder, parts):
        self.config = encoder.config
        self.positions = SimpleNamespace(axes=1, takes_text_axis=False)
        self.parts = iter(parts)
        self.checked = []

    def features(self, _, ids):
        return {**next(self.parts), "position_ids": torch.arange(len(ids))[None]}

    def check(self, ids, inputs):
        self.checked.append((ids.shape, inputs["pixel_values_videos"].shape))
        return "tokens: 4, features: 6"

    mixes_images_and_videos = MultimodalEncoder.mixes_images_and_videos
    _has_video_token = MultimodalEncoder._has_video_token


def collate(encoder, count):
    sample = {"input_ids": torch.arange(2 * count), "labels": torch.arange(2 * count), "padding": 0}
    collator = collation.MultimodalCollator(encoder, packing=True)
    return collator([sample | {"lengths": [2] * count, "extras": [b""] * count}])


def videos(frames):
    return {"pixel_values_videos": torch.ones(1, frames, 3, 2, 2)}


def test_videos_that_a_model_does_not_take_together_raise(encoder_of):
    encoder = GivenFeatures(encoder_of(), [videos(1), videos(3)])
    with pytest.raises(DataError, match=r"tokens: 4, features: 6\n.*1 x 3 x 2 x 2, 3 x 3 x 2 x 2\n.*packing: false"):
        collate(encoder, 2)
    assert encoder.checked == [((1, 4), (2, 3, 3, 2, 2))]


def test_videos_of_one_size_are_not_checked(encoder_of):
    encoder = GivenFeatures(encoder_of(), [videos(3), videos(3)])
    assert collate(encoder, 2)["pixel_values_videos"].shape == (2, 3, 3, 2, 2)
    assert not encoder.checked


@pytest.mark.parametrize("has_video_token", [False, True])
def test_images_beside_videos_with_one_token_raise(encoder_of, has_video_token):
    encoder = GivenFeatures(encoder_of(), [videos(3), {"pixel_values": torch.ones(1, 3, 2, 2)}])
    encoder.config = PreTrainedConfig(video_token_id=2 if has_video_token else 9)
    if has_video_token:
        assert collate(encoder, 2).keys() >= {"pixel_values", "pixel_values_videos"}
        return
    with pytest.raises(DataError, match=r"marks images and videos with one token\n.*and images"):
        collate(encoder, 2)


def rendered(encoder, document):
    """The text of a sample, with [1] for the image 1.png."""
    description = from_bytes(document.extra)
    text = description["text"]
    for _, source in description["media"]:
        text = text.replace("<|vision_start|><|image_pad|><|vision_end|>", f"[{source[0]}]", 1)
    return text


@pytest.mark.parametrize(
    ("turns", "images", "expected"),
    [
        # Text about a tag between two questions with images.
        (
            [("user", "<image>?"), ("assistant", "a <image> tag"), ("user", "<image>?")],
            2,
            ["[1]?", "a <image> tag", "[2]?"],
        ),
        # An answer with an image, and text after it.
        (
            [("user", "<image>?"), ("assistant", "<image> is it"), ("user", "<image>?")],
            3,
            ["[1]?", "[2] is it", "[3]?"],
        ),
        # The page of a scan, as TRL gives it, whose text has a figure.
        ([("user", "read it"), ("assistant", "text <image> text")], 1, ["[1]read it", "text <image> text"]),
        # A tool that returns an image.
        ([("user", "look"), ("tool", "<image>"), ("assistant", "an <image>")], 1, ["look", "[1]", "an <image>"]),
        # Instructions about tags.
        ([("system", "<image> is an image"), ("user", "<image>?")], 1, ["<image> is an image", "[1]?"]),
        ([("system", "as <image>"), ("user", "<image>?")], 2, ["as [1]", "[2]?"]),
        # A part beside it.
        ([("user", [IMAGE]), ("assistant", "an <image>")], 1, ["[1]", "an <image>"]),
        ([("user", [IMAGE]), ("assistant", "an <image>")], 2, ["[1]", "an [2]"]),
    ],
)
def test_tags_in_other_turns_than_the_users(encoder_of, tmp_path, turns, images, expected):
    names = [draw(tmp_path / f"{number + 1}.png", number).name for number in range(images)]
    turns = [*turns, ("assistant", "a red circle")] if turns[-1][0] == "user" else turns
    expected = expected if len(expected) == len(turns) else [*expected, "a red circle"]
    encoder = encoder_of()
    messages = [{"role": role, "content": content} for role, content in turns]
    (document,), problems, _ = encode(encoder, write(tmp_path, {"messages": messages, "images": names}))
    assert not problems
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for (role, _), text in zip(turns, expected, strict=True))
    assert rendered(encoder, document) == shown


def test_completion_with_an_image(encoder_of, tmp_path):
    names = [draw(tmp_path / f"{number + 1}.png", number).name for number in range(2)]
    record = {"prompt": "<image>?", "completion": "<image> is a circle", "images": names}
    encoder = encoder_of()
    (document,), problems, _ = encode(encoder, write(tmp_path, record))
    assert not problems
    assert rendered(encoder, document) == (
        "<|im_start|>user\n[1]?<|im_end|>\n<|im_start|>assistant\n[2] is a circle<|im_end|>\n"
    )


def test_tags_in_answers_that_do_not_fit(encoder_of, tmp_path):
    messages = talk(question="<image>?", answer="<image> or <image>")
    _, (problem,), _ = encode(encoder_of(), write(tmp_path, {"messages": messages, "images": ["1.png", "2.png"]}))
    assert "1 more of image (without 2 <image> in other turns than the user's, which do not fit)" in problem


@pytest.mark.parametrize("form", ["text", "lists"])
def test_media_in_messages_of_other_forms(encoder_of, tmp_path, form):
    """Messages as JSON text, and a list for each field, as `datasets` gave them."""
    png(tmp_path)
    messages = talk(question="<image>what?")
    names = [*messages[0]]
    given = json.dumps(messages) if form == "text" else {name: [m[name] for m in messages] for name in names}
    encoder = encoder_of()
    (document,), problems, _ = encode(encoder, write(tmp_path, {"messages": given, "images": ["1.png"]}))
    assert not problems
    assert "user\n[1]what?" in rendered(encoder, document)


def test_mask_that_an_extractor_returns_for_several_audios_alone(encoder_of):
    """Phi-4 multimodal's mask had no rows for samples with one audio, which its encoder does not take."""
    names = "audio_input_features", "audio_attention_mask"
    several = dict(zip(names, (torch.ones(2, 5, 4), torch.arange(5) < torch.tensor([[5], [2]])), strict=True))
    one = {names[0]: torch.ones(1, 3, 4)}
    encoder = GivenFeatures(encoder_of(), [one, several, {}])
    encoder.audio_mask = names
    assert collate(encoder, 3)[names[1]].sum(1).tolist() == [3, 5, 2]
    encoder.parts = iter([one, {}])
    assert names[1] not in collate(encoder, 2)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mel", "sizes", "mel_mask"], ("mel", "mel_mask")),
        (["mel", "attention_mask"], None),
        (["mel", "other_mask"], None),
    ],
)
def test_mask_of_audio_is_one_that_the_model_takes(encoder_of, names, expected):
    class Model:
        def forward(self, attention_mask, mel_mask):
            pass

    encoder = encoder_of()
    encoder.processor.feature_extractor = SimpleNamespace(model_input_names=names)
    encoder.positions = SimpleNamespace(model=Model())
    assert encoder.audio_mask == expected
