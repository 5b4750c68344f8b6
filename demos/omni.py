"""Audio demo: train a small omni model until it names tones.

    python -m demos.omni [--output outputs/demo-omni] [--steps N]

Writes tones as WAV files, makes conversations about them, trains a tokenizer, runs `opslot train
configs/omni_demo.yaml`, and writes a page with held-out tones, the model's answers and the loss curve. Needs no network
and no GPU; takes a few minutes on two cores.
"""

from __future__ import annotations

import json
import random
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np

from demos.media import MediaDemo, player
from opslot.data.python_sources import train_tokenizer

VOCABULARY = 384
RATE = 16_000
# Tokens by the names that the processor looks up.
TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% else %}<|vision_bos|><|VIDEO|><|vision_eos|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NOTES = {"C": 523.3, "D": 587.3, "E": 659.3, "F": 698.5, "G": 784.0, "A": 880.0, "B": 987.8}
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniForConditionalGeneration"],
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {
            "model_type": "qwen2_5_omni_text",
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 256,
            "max_position_embeddings": 256,
            "initializer_range": 0.05,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
        },
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            "d_model": 96,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 192,
            "num_mel_bins": 64,
            "n_window": 50,
            "max_source_positions": 256,
            "output_dim": 128,
            "initializer_range": 0.05,
        },
        "vision_config": {
            "model_type": "qwen2_5_omni_vision_encoder",
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [0],
            "out_hidden_size": 128,
        },
        "initializer_range": 0.05,
    },
    "enable_audio_output": False,
}


def write_model(folder: Path, texts: list[str]) -> None:
    """Write config.json, the processor and a tokenizer that is trained on `texts`."""
    train_tokenizer(texts, folder, VOCABULARY, ("<|im_start|>", "<|im_end|>", *TOKENS.values()), "<|im_end|>", TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = TOKENS
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    number = {token["content"]: token["id"] for token in added}
    ids = {f"{kind}_token_id": number[TOKENS[f"{kind}_token"]] for kind in ("image", "audio", "video")}
    ids |= {f"{kind}_token_index": number[TOKENS[f"{kind}_token"]] for kind in ("image", "audio", "video")}
    for kind in ("vision", "audio"):
        ids |= {f"{kind}_start_token_id": number[f"<|{kind}_bos|>"], f"{kind}_end_token_id": number[f"<|{kind}_eos|>"]}
    config = MODEL | {"thinker_config": MODEL["thinker_config"] | ids}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    audio = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 64, "sampling_rate": RATE}
    audio |= {"hop_length": 160, "n_fft": 400, "chunk_length": 2, "return_attention_mask": True}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2}
    image |= {"temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    processor = audio | image | {"processor_class": "Qwen2_5OmniProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def _tone(rng: random.Random, notes: list[str]) -> np.ndarray:
    """Notes at once, float [samples]: with overtones, an envelope, and a little noise."""
    seconds = rng.uniform(0.25, 0.4)
    time = np.arange(int(seconds * RATE)) / RATE
    sound = np.zeros_like(time)
    for note in notes:
        frequency = NOTES[note] * rng.uniform(0.995, 1.005)
        phase = rng.uniform(0, 2 * np.pi)
        sound += np.sin(2 * np.pi * frequency * time + phase)
        sound += rng.uniform(0.1, 0.4) * np.sin(4 * np.pi * frequency * time)
    envelope = np.minimum(1, np.minimum(time, time[::-1]) / 0.02)
    noise = np.random.default_rng(rng.randrange(1 << 30)).normal(0, 0.01, time.size)
    return rng.uniform(0.4, 0.8) * envelope * sound / (1.4 * len(notes)) + noise


def _write_wav(file: Path, sound: np.ndarray) -> None:
    with wave.open(str(file), "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(2)
        stream.setframerate(RATE)
        stream.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())


def _sample(rng: random.Random, folder: Path, name: str) -> dict[str, Any]:
    """A conversation about a tone, two at once, several one after another, or without audio."""
    kind = rng.choice(("tone", "tone", "together", "tones", "text"))
    if kind == "text":
        first, second = rng.sample(list(NOTES), 2)
        higher = max(first, second, key=NOTES.__getitem__)
        return _conversation(f"Which is higher, {first} or {second}?", higher)
    if kind == "tones":
        notes = [rng.choice(list(NOTES)) for _ in range(rng.randint(2, 3))]
        gap = np.zeros(RATE // 20)
        sound = np.concatenate([part for note in notes for part in (_tone(rng, [note]), gap)])
        question, answer = "Name the tones.", " ".join(notes)
    else:
        notes = sorted(rng.sample(list(NOTES), 1 if kind == "tone" else 2))
        sound = _tone(rng, notes)
        question = "Which tone is this?" if kind == "tone" else "Which two tones sound together?"
        answer = " and ".join(notes)
    file = folder / f"{name}.wav"
    _write_wav(file, sound)
    audio = {"type": "audio", "audio": f"{folder.name}/{file.name}"}
    return _conversation([audio, {"type": "text", "text": question}], answer)


def _conversation(question: Any, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _load_audio(files: list[Path]) -> dict[str, Any]:
    from opslot.data.multimodal.audio import load_audio

    return {"audio": [load_audio(file.name, file.parent, RATE) for file in files]} if files else {}


DEMO = MediaDemo(
    "omni",
    __doc__.splitlines()[0],
    "tones",
    "An omni model names tones",
    _sample,
    write_model,
    "Qwen2_5OmniThinkerForConditionalGeneration",
    _load_audio,
    player,
)

if __name__ == "__main__":
    sys.exit(DEMO.main())
