"""What the demos of task vlm share: making inputs, training, answering held-out questions, and the page of answers."""

from __future__ import annotations

import argparse
import base64
import html
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demos.command import run_demo, train_demo
from opslot._base.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

HELD_OUT = 120


@dataclass(frozen=True)
class MediaDemo:
    """A demo of task vlm.

    Attributes:
        name: of the module, `demos.<name>`.
        description: of the command.
        media: what the questions are about, such as "drawings".
        title: of the page.
        sample: makes a conversation and writes its media, given a random generator, the folder of the media, and the
            name of the sample.
        write_model: writes config.json, the processor and the tokenizer, given the folder and the texts.
        model_class: of Transformers, for the answers.
        load_media: arguments of the processor, given the media files of a question.
        show: HTML of a media file.
    """

    name: str
    description: str
    media: str
    title: str
    sample: Callable[[random.Random, Path, str], dict[str, Any]]
    write_model: Callable[[Path, list[str]], None]
    model_class: str
    load_media: Callable[[list[Path]], dict[str, Any]]
    show: Callable[[Path], str]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the demo; returns its exit code."""
        samples = {"type": int, "default": 3000, "help": "training conversations; default: %(default)s"}
        config, output = f"{self.name}_demo", f"demo-{self.name}"
        return run_demo(self.name, self.description, config, output, self._run, argv, samples=samples)

    def _run(self, options: argparse.Namespace, console: Console) -> None:
        output = options.output
        console.rule(f"[bold]1. {self.media}, processor and tokenizer")
        held_out = self.write_inputs(output, options.samples)
        console.print(f"conversations, media, processor and model configuration are in {output}", highlight=False)
        trainer = train_demo(options, console)
        if trainer is None:
            return
        console.rule(f"[bold]3. held-out {self.media}")
        answers = self.answer(trainer.output_dir / "hf", output / "data", held_out)
        right = [given == sample["messages"][-1]["content"] for sample, given in zip(held_out, answers, strict=True)]
        console.print(
            f"{sum(right) / len(right):.0%} of {len(right)} held-out questions answered right", highlight=False
        )
        page = self.write_page(output, held_out, answers, trainer.output_dir / "loss.png")
        console.print(f"samples, answers and loss curve: {page}", highlight=False)

    def write_inputs(self, output: Path, samples: int) -> list[dict[str, Any]]:
        """Write train.jsonl, eval.jsonl, the media, the processor and config.json; returns held-out samples."""
        rng = random.Random(0)
        media = output / "data" / "media"
        media.mkdir(parents=True)
        trained = [self.sample(rng, media, f"train{number}") for number in range(samples)]
        held_out = [self.sample(rng, media, f"eval{number}") for number in range(HELD_OUT)]
        for name, listed in (("train", trained), ("eval", held_out)):
            (output / "data" / f"{name}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in listed))
        self.write_model(output / "model", [_text(message) for sample in trained for message in sample["messages"]])
        return held_out

    def answer(self, folder: Path, data: Path, samples: list[dict[str, Any]]) -> list[str]:
        """Answers of an exported model, with plain Transformers."""
        import torch
        import transformers
        from transformers.utils import logging

        from opslot.trainer.processors import load_processor

        logging.disable_progress_bar()
        processor: Any = load_processor(folder)
        model = getattr(transformers, self.model_class).from_pretrained(folder).eval()
        end = processor.tokenizer.eos_token_id
        answers = []
        for sample in samples:
            question = sample["messages"][:1]
            text = processor.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
            media = self.load_media([data / name for name in _files(sample)])
            inputs = processor(text=[text], **media, return_tensors="pt")
            with torch.no_grad():
                output = model.generate(
                    **inputs, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=end
                )
            new = output[0, inputs["input_ids"].shape[1] :]
            answers.append(str(processor.tokenizer.decode(new, skip_special_tokens=True)).strip())
        return answers

    def write_page(self, output: Path, samples: list[dict[str, Any]], answers: list[str], curve: Path) -> Path:
        """A page with the media, questions and answers of held-out samples, and the loss curve."""
        cards = []
        right = 0
        for sample, given in zip(samples, answers, strict=True):
            user, wanted = sample["messages"][0], sample["messages"][-1]["content"]
            right += given == wanted
            pictures = "".join(self.show(output / "data" / name) for name in _files(sample))
            kind = "right" if given == wanted else "wrong"
            answer = f"<b>{html.escape(wanted)}</b>"
            if given != wanted:
                answer = f"<s>{html.escape(given)}</s> {answer}"
            cards.append(f'<div class="card {kind}">{pictures}<p>{html.escape(_text(user))}</p>{answer}</div>')
        plot = picture(curve, "curve") if curve.is_file() else ""
        page = output / "index.html"
        write_text(
            page,
            f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>opslot: {html.escape(self.media)}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #1f2933; padding: 0 1rem }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem }}
.card {{ border: 1px solid #d9e2ec; border-left: 4px solid #2a9d50; border-radius: 4px; padding: .5rem .7rem }}
.wrong {{ border-left-color: #d62828 }} .card p {{ margin: .3rem 0; color: #52606d }} s {{ color: #d62828 }}
.card audio {{ width: 100%; height: 2rem }}
.card img {{ width: 64px; image-rendering: pixelated; border: 1px solid #e4e7eb; margin-right: 4px }}
.curve {{ max-width: 100% }}
</style>
<h1>{html.escape(self.title)}</h1>
<p>{right} of {len(samples)} held-out questions are answered right. Wrong answers are struck through, with the right
one beside them.</p>
{plot}
<div class="cards">{"".join(cards)}</div></html>
""",
        )
        return page


def picture(file: Path, kind: str = "drawing") -> str:
    """HTML of a PNG file."""
    return f'<img class="{kind}" alt="{kind}" src="data:image/png;base64,{_encoded(file)}">'


def player(file: Path) -> str:
    """HTML of a WAV file."""
    return f'<audio controls src="data:audio/wav;base64,{_encoded(file)}"></audio>'


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _files(sample: dict[str, Any]) -> list[str]:
    """The media files of a sample's question."""
    content = sample["messages"][0]["content"]
    return [part[part["type"]] for part in content if part["type"] != "text"] if isinstance(content, list) else []


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content).strip()
