"""A tiny vision-language model with its processor, and drawn samples."""

import json
from pathlib import Path

from PIL import Image, ImageDraw

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 8,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}


def write_model(folder: Path) -> Path:
    """config.json of a tiny qwen3_vl, and its processor with a byte-level tokenizer."""
    from transformers import AutoConfig

    from opslot.data.python_sources import train_tokenizer

    train_tokenizer(["what is it? a red circle"], folder, 280, SPECIAL, "<|im_end|>", TEMPLATE)
    ids = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    number = {token["content"]: token["id"] for token in ids}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)
    settings = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "do_resize": True}
    settings |= {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 256, "longest_edge": 4096}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"processor_class": "Qwen3VLProcessor"}))
    video = settings | {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    video.pop("image_processor_type")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


def draw(file: Path, number: int) -> Path:
    """An image that depends on `number`, in its size too."""
    image = Image.new("RGB", (32 + 16 * (number % 3), 32 + 16 * (number % 2)), (number * 40 % 256, 80, 120))
    ImageDraw.Draw(image).ellipse((4, 4, 20 + number % 8, 24), fill=(250, number * 70 % 256, 10))
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)
    return file


def talk(*images, question="what is it?", answer="a red circle"):
    """Messages with images in the user's turn."""
    parts = [{"type": "image", "image": str(image)} for image in images]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": question}] if parts else question},
        {"role": "assistant", "content": answer},
    ]


def write_samples(folder: Path, count: int = 12) -> Path:
    """A file of conversations with zero, one or two images each."""
    lines = []
    for number in range(count):
        images = [draw(folder / "img" / f"{number}_{i}.png", number + i) for i in range(number % 3)]
        names = [image.relative_to(folder) for image in images]
        lines.append({"messages": talk(*names, answer="a red circle"[: 3 + number % 9])})
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
