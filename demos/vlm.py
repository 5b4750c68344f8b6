"""Vision demo: train a small vision-language model until it reads drawn digits and shapes.

    python -m demos.vlm [--output outputs/demo-vlm] [--steps N]

Draws images, makes conversations about them, trains a tokenizer, runs `opslot train configs/vlm_demo.yaml`, and writes
a page with held-out images, the model's answers and the loss curve. Needs no network and no GPU; takes a few minutes
on two cores.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demos.media import MediaDemo, picture
from opslot.data.python_sources import train_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

VOCABULARY = 384
SIDE = 32
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = ("circle", "square", "triangle", "cross")
COLORS = {"red": (214, 40, 40), "green": (42, 157, 80), "blue": (30, 90, 210), "black": (20, 20, 20)}
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 256,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 96,
        "num_heads": 4,
        "intermediate_size": 192,
        "out_hidden_size": 128,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [1],
        "initializer_range": 0.05,
    },
}


def write_model(folder: Path, texts: list[str]) -> None:
    """Write config.json, the processor and a tokenizer that is trained on `texts`."""
    train_tokenizer(texts, folder, VOCABULARY, SPECIAL, "<|im_end|>", TEMPLATE)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    number = {token["content"]: token["id"] for token in added}
    tokens = {f"{name}_token_id": number[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    tokens |= {f"{name}_token_id": number[f"<|{name}_pad|>"] for name in ("image", "video")}
    (folder / "config.json").write_text(json.dumps(MODEL | tokens, indent=2) + "\n")
    sizes: dict[str, Any] = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    sizes |= {"size": {"shortest_edge": 256, "longest_edge": 65536}, "processor_class": "Qwen3VLProcessor"}
    image = sizes | {"image_processor_type": "Qwen2VLImageProcessor"}
    video = sizes | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")


def draw_digit(rng: random.Random, digit: int) -> Image:
    """A digit, moved and turned a little."""
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    image = Pillow.new("RGB", (SIDE, SIDE), "white")
    place = (SIDE / 2 + rng.uniform(-1.5, 1.5), SIDE / 2 + rng.uniform(-1.5, 1.5))
    font = ImageFont.load_default(size=26)
    ImageDraw.Draw(image).text(place, str(digit), fill=COLORS["black"], font=font, anchor="mm")
    return image.rotate(rng.uniform(-6, 6), fillcolor="white")


def draw_shape(rng: random.Random, shape: str, color: str) -> Image:
    """A filled shape at a random position."""
    from PIL import Image as Pillow
    from PIL import ImageDraw

    image = Pillow.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    radius = rng.uniform(7, 11)
    x, y = (rng.uniform(radius + 1, SIDE - radius - 1) for _ in range(2))
    box = (x - radius, y - radius, x + radius, y + radius)
    fill = COLORS[color]
    if shape == "circle":
        draw.ellipse(box, fill=fill)
    elif shape == "square":
        draw.rectangle(box, fill=fill)
    elif shape == "triangle":
        corners = [(x + radius * math.sin(a), y - radius * math.cos(a)) for a in (0, 2 * math.pi / 3, 4 * math.pi / 3)]
        draw.polygon(corners, fill=fill)
    else:
        draw.line(box, fill=fill, width=5)
        draw.line((box[0], box[3], box[2], box[1]), fill=fill, width=5)
    return image


def _sample(rng: random.Random, folder: Path, name: str) -> dict[str, Any]:
    """A conversation about a digit, several digits, a shape, or without an image."""
    kind = rng.choice(("digit", "digit", "digits", "shape", "shape", "text"))
    drawn: list[Image] = []
    if kind == "text":
        digit = rng.randint(0, 8)
        question, found = f"Which digit comes after {digit}?", str(digit + 1)
    elif kind == "shape":
        shape, color = rng.choice(SHAPES), rng.choice(list(COLORS))
        drawn = [draw_shape(rng, shape, color)]
        question, found = "Which shape is this?", f"a {color} {shape}"
    else:
        digits = [rng.randint(0, 9) for _ in range(1 if kind == "digit" else rng.randint(2, 3))]
        drawn = [draw_digit(rng, digit) for digit in digits]
        question = "Which digit is this?" if kind == "digit" else "Read the digits."
        found = " ".join(map(str, digits))
    parts: list[dict[str, str]] = []
    for number, image in enumerate(drawn):
        file = folder / f"{name}_{number}.png"
        image.save(file)
        parts.append({"type": "image", "image": f"{folder.name}/{file.name}"})
    content: Any = [*parts, {"type": "text", "text": question}] if parts else question
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": found}]}


def _load_images(files: list[Path]) -> dict[str, Any]:
    from PIL import Image as Pillow

    return {"images": [Pillow.open(file).convert("RGB") for file in files]} if files else {}


DEMO = MediaDemo(
    "vlm",
    __doc__.splitlines()[0],
    "drawings",
    "A vision-language model reads drawn digits and shapes",
    _sample,
    write_model,
    MODEL["architectures"][0],
    _load_images,
    picture,
)

if __name__ == "__main__":
    sys.exit(DEMO.main())
