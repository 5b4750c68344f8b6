"""Task vlm with a processor whose tokenizer renders conversations as tokens: Voxtral's, of mistral-common."""

import base64
import json

import pytest
import torch
import transformers

from opslot.verify.tiny import tiny_config
from tests.trainer.runs import trainer_of
from tests.trainer.test_processors import samples, talk

pytest.importorskip("mistral_common")
pytest.importorskip("soundfile")

_SPECIAL = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 6: "[/AVAILABLE_TOOLS]"}
_SPECIAL |= {7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]", 11: "<pad>", 17: "[SYSTEM_PROMPT]"}
_SPECIAL |= {10: "[IMG]", 12: "[IMG_BREAK]", 13: "[IMG_END]", 14: "[PREFIX]", 15: "[MIDDLE]", 16: "[SUFFIX]"}
_SPECIAL |= {18: "[/SYSTEM_PROMPT]", 19: "[TOOL_CONTENT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"}
MORE = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "a blue one"}]


def write_voxtral(folder):
    """A checkpoint of a tiny Voxtral with a tekken.json of bytes."""
    names = [_SPECIAL.get(i, f"<SPECIAL_{i}>") for i in range(36)]
    settings = {"pattern": r"\p{L}+|\P{L}", "num_vocab_tokens": 256, "default_vocab_size": 292, "version": "v7"}
    encoding = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}
    audio = {"sampling_rate": 16000, "frame_rate": 12.5, "audio_encoding_config": encoding, "chunk_length_s": 30.0}
    tekken = {
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)
        ],
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)],
        "config": settings | {"default_num_special_tokens": len(names)},
        "version": 7,
        "type": "Tekken",
        "audio": audio,
    }
    (folder / "tekken.json").write_text(json.dumps(tekken))
    config = tiny_config("voxtral")
    config.audio_token_id = 24
    config.text_config.vocab_size = 292
    config.text_config.max_position_embeddings = 2048
    config.audio_config.num_mel_bins, config.audio_config.max_source_positions = 128, 1500
    # Four frames of the encoder are one token.
    config.audio_config.intermediate_size = 4 * config.audio_config.hidden_size
    config.save_pretrained(folder)
    tokenizer = transformers.MistralCommonBackend.from_pretrained(folder)
    processor = transformers.VoxtralProcessor(transformers.WhisperFeatureExtractor(feature_size=128), tokenizer)
    processor.save_pretrained(folder)
    return processor


@pytest.fixture
def voxtral(settings, tmp_path):
    processor = write_voxtral(tmp_path)
    lines = samples(tmp_path, {"audio"})
    lines.append({"messages": [*lines[-1]["messages"], *MORE]})
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings |= {"task": "vlm", "model": {"config_path": str(tmp_path)}}
    settings["data"] |= {"train_path": str(tmp_path / "chat.jsonl"), "max_seq_len": 1024, "shuffle": False}
    settings["train"] |= {"global_batch_size": len(lines)}
    return processor


def test_audio_is_decoded_once_to_tokenize_a_sample(voxtral, settings, tmp_path, monkeypatch):
    from opslot.data.multimodal import loading

    decoded, load = [], loading.load_audio
    monkeypatch.setattr(loading, "load_audio", lambda *given: decoded.append(given) or load(*given))
    trainer = trainer_of(settings, tmp_path)
    audio = sum(b"tone.wav" in extra for i in range(len(trainer.train_set)) for extra in trainer.train_set.extras(i))
    assert audio
    assert len(decoded) == audio


def test_inputs_are_those_of_the_processor(voxtral, settings, tmp_path):
    settings["data"]["packing"] = False
    trainer = trainer_of(settings, tmp_path, "--train.micro_batch_size=1")
    text, audio, turns = trainer.next_micro_batches(iter(trainer.batches))
    question = talk({"type": "audio", "path": str(tmp_path / "tone.wav")})["messages"][:1]
    theirs = voxtral.apply_chat_template(question)
    length = theirs["input_ids"].shape[1]
    assert torch.equal(audio["input_ids"][:, :length], theirs["input_ids"])
    torch.testing.assert_close(audio["input_features"], theirs["input_features"], rtol=0, atol=1e-4)
    assert "input_features" not in text
    one, two = ["a red circle"], ["a red circle", "a blue one"]
    for batch, answers in ((text, one), (audio, one), (turns, two)):
        labels = batch["labels"][batch["labels"] != -100]
        assert voxtral.tokenizer.decode(labels) == "".join(f"{answer}</s>" for answer in answers)


def test_packed_equals_unpacked(voxtral, settings, tmp_path):
    losses = []
    for packing in (True, False):
        settings["data"]["packing"] = packing
        trainer = trainer_of(settings, tmp_path, *([] if packing else ["--train.micro_batch_size=1"]))
        batches = trainer.next_micro_batches(iter(trainer.batches))
        assert len(batches) == (1 if packing else 3)
        count = sum(map(trainer.count_targets, batches))
        losses.append(sum(trainer.forward(batch, count).loss.item() for batch in batches))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_training_exports_the_processor(voxtral, settings, train, tmp_path):
    settings["train"] |= {"max_steps": 2, "eval_steps": 2}
    settings["evaluation"] = {"prompts": ["what?"]}
    code, _, error = train()
    assert code == 0, error
    exported = next((tmp_path / "out").rglob("tekken.json")).parent
    assert isinstance(transformers.AutoProcessor.from_pretrained(exported), transformers.VoxtralProcessor)


def test_chat_template_raises(voxtral, settings, train, tmp_path):
    settings["data"]["chat_template"] = "none"
    code, _, error = train()
    assert code == 2
    assert "data.chat_template: MistralCommonBackend has a template of its own" in error
