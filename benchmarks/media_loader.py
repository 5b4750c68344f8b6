"""The dataloader of task vlm: samples/s for 1024 x 1024 JPEG files, or for videos, with the processor of qwen3_vl.

    python benchmarks/media_loader.py [--workers 0,1,2] [--samples N] [--video SECONDS] [--output FILE]

A video has 25 frames of 640 x 360 a second and a keyframe every ten seconds; 16 of its frames are taken (needs PyAV and
torchvision).

Times are of samples after the first micro batch, which waits for the tokenization and for the start of the workers.
CPU time is that of this process, which keeps freed memory as the workers do, and, without workers, of all the work:
samples/s of one core that has nothing else to do; `decoding`, `processor` and `positions` are its parts.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

GOAL = 15.0
SIDE = 1024
# Methods of the encoder of samples.
PARTS = {"decoding": "_load", "processor": "_process", "positions": "_rotary_positions"}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_inputs(folder: Path, samples: int, seconds: float = 0) -> None:
    """A tiny qwen3_vl with its processor, and conversations of one image, or a video of `seconds`, and about 512 tokens
    of text.
    """
    import numpy as np
    from PIL import Image
    from transformers import AutoConfig

    from opslot.data.python_sources import train_tokenizer

    train_tokenizer(["what is it? a red circle"], folder, 300, SPECIAL, "<|im_end|>", TEMPLATE)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    number = {token["content"]: token["id"] for token in added}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 16}
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    names = ("image", "video"), ("vision_start", "vision_end")
    ids = {f"{kind}_token_id": number[f"<|{kind}_pad|>"] for kind in names[0]}
    ids |= {f"{kind}_token_id": number[f"<|{kind}|>"] for kind in names[1]}
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, **ids)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)
    image: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    image |= {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "processor_class": "Qwen3VLProcessor"}
    processors = {"preprocessor_config": "Qwen2VLImageProcessor", "video_preprocessor_config": "Qwen3VLVideoProcessor"}
    for name, cls in processors.items():
        kind = "video_processor_type" if name.startswith("video") else "image_processor_type"
        (folder / f"{name}.json").write_text(json.dumps({**image, kind: cls}))
    rng = np.random.default_rng(0)
    with (folder / "chat.jsonl").open("w") as lines:
        for sample in range(samples):
            if seconds:
                media = {"type": "video", "video": _write_video(folder / f"{sample}.mp4", seconds, sample)}
            else:
                pixels = Image.fromarray(rng.integers(0, 255, (64, 64, 3)).astype("uint8"))
                pixels.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / f"{sample}.jpg", quality=90)
                media = {"type": "image", "image": f"{sample}.jpg"}
            parts = [media, {"type": "text", "text": "what is it? " * 20}]
            answer = {"role": "assistant", "content": "a red circle " * 20}
            lines.write(json.dumps({"messages": [{"role": "user", "content": parts}, answer]}) + "\n")


def _write_video(file: Path, seconds: float, seed: int) -> str:
    import av
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    scene = Image.fromarray(rng.integers(0, 255, (36, 64, 3)).astype("uint8")).resize((768, 432))
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 640, 360, "yuv420p", 250
        for number in range(round(25 * seconds)):
            left, top = number % 128, number % 72
            container.mux(stream.encode(av.VideoFrame.from_image(scene.crop((left, top, left + 640, top + 360)))))
        container.mux(stream.encode())
    return file.name


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """CPU seconds by part of the work, of the dataloader in this process."""
    from opslot.data.multimodal.samples import MultimodalEncoder

    found = dict.fromkeys(PARTS, 0.0)
    originals = {name: getattr(MultimodalEncoder, name) for name in PARTS.values()}

    def timed(part: str, original: Any) -> Any:
        def call(*args: Any) -> Any:
            start = time.process_time()
            try:
                return original(*args)
            finally:
                found[part] += time.process_time() - start

        return call

    for part, name in PARTS.items():
        setattr(MultimodalEncoder, name, timed(part, originals[name]))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(MultimodalEncoder, name, original)


def measure(folder: Path, workers: int, samples: int) -> tuple[float, float, dict[str, float]]:
    """Seconds per sample: of wall time, and of CPU time of this process, also by part."""
    from opslot.cli.data import documents_of, open_data
    from opslot.trainer.parse import load_config

    settings = {
        "task": "vlm",
        "model.config_path": folder,
        "data.train_path": folder / "chat.jsonl",
        "data.max_seq_len": 4096,
        "data.max_tokens_per_batch": 16384,
        "data.max_frames": 16,
        "data.num_workers": workers,
        "data.cache_dir": folder / "cache",
        "train.output_dir": folder / "out",
        # As on a GPU.
        "train.fsdp.param_dtype": "bfloat16",
        "train.global_batch_size": 4,
        "train.max_steps": 1000,
    }
    config = load_config([f"--{name}={value}" for name, value in settings.items()])
    with open_data(config) as data, closing(data.micro_batches()) as batches:
        next(batches)
        with timed_parts() as parts:
            start, cpu, count = time.perf_counter(), time.process_time(), 0
            while count < samples:
                count += len(documents_of(next(batches)))
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return seconds / count, cpu / count, {part: used / count for part, used in parts.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="0,1,2", help="numbers of worker processes (default 0,1,2)")
    parser.add_argument("--samples", type=int, default=64, help="samples to measure (default 64)")
    parser.add_argument("--video", type=float, default=0, help="seconds of a video in place of the image")
    parser.add_argument("--output", help="write the result as JSON")
    args = parser.parse_args()
    import torch

    from opslot._base.host_memory import keep_freed_memory
    from opslot.bench.files import OutputFiles
    from opslot.bench.result import Environment, Result, Run, Value

    torch.set_num_threads(1)
    keep_freed_memory()
    files = OutputFiles(args.output)
    values = []
    with tempfile.TemporaryDirectory() as scratch:
        write_inputs(Path(scratch), args.samples, args.video)
        for workers in map(int, args.workers.split(",")):
            seconds, cpu, parts = measure(Path(scratch), workers, args.samples)
            values.append(Value(f"{workers} workers", 1 / seconds, "samples/s"))
            if workers == 0:
                values.append(Value("one core", 1 / cpu, "samples/s"))
                values.extend(Value(part, 1e3 * used, "ms/sample") for part, used in parts.items())
                goal = "" if args.video else "<= 4"
                values.append(Value(f"workers for {GOAL:g} samples/s", math.ceil(GOAL * cpu), "workers", goal))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    values.append(Value("peak memory of the main process", peak, "GiB"))
    for value in values:
        print(f"{value.name:30} {value.value:8.2f} {value.unit} {value.goal}")
    command = f"python benchmarks/media_loader.py --workers {args.workers} --samples {args.samples}"
    command += f" --video {args.video:g}" if args.video else ""
    files.write(Result("benchmarks/media_loader.py", [Run(command, Environment.current("cpu"), values=values)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
