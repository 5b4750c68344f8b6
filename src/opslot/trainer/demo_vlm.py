"""Vision demo: train a small vision-language model until it reads drawn digits and shapes.

    python -m opslot.trainer.demo_vlm [--output outputs/demo-vlm] [--steps N]

Draws images, makes conversations about them, trains a tokenizer, runs `opslot train configs/vlm_demo.yaml`, and writes
a page with held-out images, the model's answers and the loss curve. Needs no network and no GPU; takes a few minutes
on two cores.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import OpslotError
from opslot._base.files import write_text
from opslot.data.python_sources import train_tokenizer
from opslot.trainer.demo import clear_output, path_arguments
from opslot.trainer.threads import wait_without_spinning

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    wait_without_spinning()
    from opslot.trainer.display import make_console

    parser = argparse.ArgumentParser("python -m opslot.trainer.demo_vlm", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/demo-vlm"), help="default: %(default)s")
    parser.add_argument("--config", type=Path, default=Path("configs/vlm_demo.yaml"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps; default those of the configuration")
    parser.add_argument("--samples", type=int, default=3000, help="training conversations; default: %(default)s")
    options = parser.parse_args(argv)
    try:
        return _demo(options.output, options.config, options.steps, options.samples, make_console())
    except OpslotError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2


def _demo(output: Path, config_file: Path, steps: int | None, samples: int, console: Console) -> int:
    from opslot.trainer.main import run
    from opslot.trainer.parse import load_config

    started = time.monotonic()
    clear_output(output)
    console.rule("[bold]1. drawings, processor and tokenizer")
    held_out = write_inputs(output, samples)
    console.print(f"conversations, images, processor and model configuration are in {output}", highlight=False)
    arguments = [str(config_file), *path_arguments(output), *([f"--train.max_steps={steps}"] if steps else [])]
    console.rule(f"[bold]2. opslot train {config_file}")
    trainer, result = run(load_config(arguments), console)
    if not result.completed:
        return 0
    console.rule("[bold]3. held-out drawings")
    answers = answer(trainer.output_dir / "hf", held_out)
    right = [given == sample["messages"][-1]["content"] for sample, given in zip(held_out, answers, strict=True)]
    console.print(f"{sum(right) / len(right):.0%} of {len(right)} held-out questions answered right", highlight=False)
    page = write_page(output, held_out, answers, trainer.output_dir / "loss.png")
    console.print(f"samples, answers and loss curve: {page}", highlight=False)
    console.print(f"\ntotal: {time.monotonic() - started:.0f} s", highlight=False)
    return 0


def write_inputs(output: Path, samples: int) -> list[dict[str, Any]]:
    """Write train.jsonl, eval.jsonl, the images, the processor and config.json; returns held-out samples."""
    rng = random.Random(0)
    images = output / "data" / "images"
    images.mkdir(parents=True)
    trained = [_sample(rng, images, f"train{number}") for number in range(samples)]
    held_out = [_sample(rng, images, f"eval{number}") for number in range(120)]
    for name, listed in (("train", trained), ("eval", held_out)):
        (output / "data" / f"{name}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in listed))
    write_model(output / "model", [_text(message) for sample in trained for message in sample["messages"]])
    return held_out


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
    """A filled shape at any place."""
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


def answer(folder: Path, samples: list[dict[str, Any]]) -> list[str]:
    """Answers of an exported model, with plain Transformers."""
    import torch
    from PIL import Image as Pillow
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    from opslot.trainer.processors import load_processor

    logging.disable_progress_bar()
    processor: Any = load_processor(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    data = folder.parents[1] / "data"
    end = processor.tokenizer.eos_token_id
    answers = []
    for sample in samples:
        question = sample["messages"][:1]
        text = processor.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        images = [Pillow.open(data / name).convert("RGB") for name in _images(sample)]
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=end)
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(str(processor.tokenizer.decode(new, skip_special_tokens=True)).strip())
    return answers


def write_page(output: Path, samples: list[dict[str, Any]], answers: list[str], curve: Path) -> Path:
    """A page with the images, questions and answers of held-out samples, and the loss curve."""
    cards = []
    right = 0
    for sample, given in zip(samples, answers, strict=True):
        user, wanted = sample["messages"][0], sample["messages"][-1]["content"]
        right += given == wanted
        pictures = "".join(_picture(output / "data" / name) for name in _images(sample))
        note = "" if given == wanted else f" <s>{html.escape(wanted)}</s>"
        kind = "right" if given == wanted else "wrong"
        cards.append(
            f'<div class="card {kind}">{pictures}<p>{html.escape(_text(user))}</p>'
            f"<b>{html.escape(given)}</b>{note}</div>"
        )
    plot = _picture(curve, "curve") if curve.is_file() else ""
    page = output / "index.html"
    write_text(
        page,
        f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>opslot: drawn digits and shapes</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #1f2933; padding: 0 1rem }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem }}
.card {{ border: 1px solid #d9e2ec; border-left: 4px solid #2a9d50; border-radius: 4px; padding: .5rem .7rem }}
.wrong {{ border-left-color: #d62828 }} .card p {{ margin: .3rem 0; color: #52606d }} s {{ color: #d62828 }}
.card img {{ width: 64px; image-rendering: pixelated; border: 1px solid #e4e7eb; margin-right: 4px }}
.curve {{ max-width: 100% }}
</style>
<h1>A vision-language model reads drawn digits and shapes</h1>
<p>{right} of {len(samples)} held-out questions are answered right. Wrong answers are marked red, with the right one
struck through beside them.</p>
{plot}
<div class="cards">{"".join(cards)}</div></html>
""",
    )
    return page


def _picture(file: Path, kind: str = "drawing") -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<img class="{kind}" alt="{kind}" src="data:image/png;base64,{data}">'


def _images(sample: dict[str, Any]) -> list[str]:
    content = sample["messages"][0]["content"]
    return [part["image"] for part in content if part["type"] == "image"] if isinstance(content, list) else []


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content).strip()


if __name__ == "__main__":
    sys.exit(main())
