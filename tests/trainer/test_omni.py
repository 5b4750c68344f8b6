"""Task vlm with audio: runs of `opslot train` on tones, with an omni model's own processor."""

import copy
import json
import tarfile
import wave

import numpy as np
import pytest
import torch
import transformers

from demos import omni as demo
from opslot.checkpoint.folder import read_folder
from opslot.cli import main
from opslot.models._multimodal.parts import parts_of
from opslot.trainer import load_config
from opslot.trainer.callbacks.writers import read_metrics
from opslot.trainer.processors import load_processor
from tests.trainer.runs import trainer_of


def write_wav(file, seconds=0.3, frequency=600.0, rate=16_000):
    sound = 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)
    with wave.open(str(file), "wb") as stream:
        stream.setparams((1, 2, rate, 0, "NONE", ""))
        stream.writeframes((sound * 32767).astype("<i2").tobytes())
    return file


def talk(*audio, answer="A and B"):
    parts = [{"type": "audio", **({"audio": source} if isinstance(source, str) else source)} for source in audio]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "Which tone?"}] if parts else "Which tone?"},
        {"role": "assistant", "content": answer},
    ]


def write_lines(file, samples):
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in samples))


@pytest.fixture
def omni_settings(settings, tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    demo.write_model(tmp_path / "omni", ["Which tone? A and B"])
    for number in range(4):
        write_wav(folder / f"{number}.wav", 0.2 + 0.3 * number, 500 + 90 * number, 16_000 if number % 2 else 8_000)
    samples = [talk(*[f"{i}.wav" for i in range(n % 3)], answer="A and B"[: 1 + n % 6]) for n in range(9)]
    write_lines(folder / "chat.jsonl", samples)
    settings["task"] = "vlm"
    settings["model"] = {"config_path": str(tmp_path / "omni")}
    settings["data"] |= {"train_path": str(folder / "chat.jsonl"), "max_seq_len": 192, "shuffle": False}
    settings["train"] |= {"global_batch_size": 6, "lr": 1e-3}
    return settings


def step(trainer, batches):
    trainer.model.zero_grad()
    count = sum(trainer.count_targets(batch) for batch in batches)
    losses = [trainer.forward(batch, count).loss for batch in batches]
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return sum(loss.item() for loss in losses), gradients


def test_packed_audio_equals_unpacked(omni_settings, tmp_path):
    trainer = trainer_of(omni_settings, tmp_path)
    packed = trainer.next_micro_batches(iter(trainer.batches))
    (batch,) = packed
    documents = len(batch["cu_seq_lens_q"]) - 1
    assert documents > 5
    assert len(batch["input_features"]) > 3
    assert batch["position_ids"].shape[0] == 4
    alone = []
    for number in range(documents):
        (tokens,) = trainer.train_set.tokens(number)
        sample = {"input_ids": torch.tensor(tokens["token"].astype("int64")), "lengths": [len(tokens)], "padding": 0}
        sample |= {"labels": torch.tensor(tokens["label"].astype("int64")), "extras": trainer.train_set.extras(number)}
        alone.append(trainer.data.collate_fn([sample]))
    loss, gradients = step(trainer, packed)
    expected, expected_gradients = step(trainer, alone)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert any("audio_tower.layers" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_loss_equals_that_of_transformers_processor_and_thinker(omni_settings, tmp_path):
    omni_settings["data"]["packing"] = False
    trainer = trainer_of(omni_settings, tmp_path, "--train.micro_batch_size=1")
    messages = talk("0.wav", "1.wav", answer="A a")
    processor = trainer.encoder.processor
    from opslot.data.multimodal.audio import load_audio

    audio = [load_audio(part["audio"], tmp_path / "samples", 16_000) for part in messages[0]["content"][:2]]
    texts = [
        processor.apply_chat_template(messages, tokenize=False),
        processor.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True),
    ]
    inputs, prompt = (processor(text=[text], audio=audio, return_tensors="pt") for text in texts)
    labels = inputs["input_ids"].clone()
    labels[:, : prompt["input_ids"].shape[1]] = -100
    labels[:, -1] = -100  # the line break after the end of the turn
    config = copy.deepcopy(trainer.model.config.thinker_config)
    config._attn_implementation = "eager"
    theirs = transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)
    theirs.load_state_dict(trainer.model.thinker.state_dict())
    expected = theirs(**inputs, labels=labels).loss.item()
    write_lines(tmp_path / "samples" / "one.jsonl", [messages])
    omni_settings["data"]["train_path"] = str(tmp_path / "samples" / "one.jsonl")
    again = trainer_of(omni_settings, tmp_path, "--train.micro_batch_size=1")
    again.model.load_state_dict(trainer.model.state_dict())
    batch = again.data.collate_fn([again.train_set[0]])
    assert again.forward(batch, again.count_targets(batch)).loss.item() == pytest.approx(expected, rel=1e-5)


def test_features_of_audio_are_those_of_the_processor_without_padding(omni_settings, tmp_path):
    from opslot.data.multimodal.audio import load_audio

    trainer = trainer_of(omni_settings, tmp_path)
    audio = load_audio("0.wav", tmp_path / "samples", 16_000)
    theirs = trainer.encoder.processor(text=["<|AUDIO|>"], audio=[audio], return_tensors="pt")
    tokens, (extra,) = trainer.train_set.tokens(1)[0]["token"], trainer.train_set.extras(1)
    ours = trainer.encoder.features(extra, torch.tensor(tokens.astype("int64")))
    assert (ours["input_features"].shape[-1], theirs["input_features"].shape[-1]) == (23, 200)
    ours, theirs = (
        found["input_features"].transpose(1, 2)[found["feature_attention_mask"].bool()] for found in (ours, theirs)
    )
    assert torch.equal(ours, theirs)


def write_checkpoint_with_speech(folder):
    """Weights of the whole model; returns its class."""
    from tests.omni import qwen2_5_omni

    config = json.loads((folder / "config.json").read_text()) | {"enable_audio_output": True}
    tiny = qwen2_5_omni().to_dict()
    config |= {name: tiny[name] for name in ("talker_config", "token2wav_config")}
    (folder / "config.json").write_text(json.dumps(config))
    cls = transformers.Qwen2_5OmniForConditionalGeneration
    cls(transformers.AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    torch.save({"Chelsie": {}}, folder / "spk_dict.pt")
    return cls


def test_adapters_of_the_thinker_load_beside_the_speech_parts(omni_settings, tmp_path, train):
    """Names such as q_proj and "0" are those of modules of the talker and the vocoder too."""
    from peft import PeftModel

    cls = write_checkpoint_with_speech(tmp_path / "omni")
    omni_settings["model"] = {"model_path": str(tmp_path / "omni")}
    omni_settings["lora"] = {"r": 2}
    omni_settings["train"]["max_steps"] = 1
    code, _, err = train()
    assert code == 0, err
    model = PeftModel.from_pretrained(cls.from_pretrained(tmp_path / "omni"), tmp_path / "out" / "hf")
    adapted = [name for name, _ in model.named_parameters() if "lora_B" in name]
    assert adapted
    assert all(name.startswith("base_model.model.thinker.") for name in adapted)


def test_generate_and_merge_of_adapters_beside_the_speech_parts(omni_settings, tmp_path, train, capsys):
    """Transformers' class has a from_pretrained of its own and answers with audio too."""
    write_checkpoint_with_speech(tmp_path / "omni")
    omni_settings["model"] = {"model_path": str(tmp_path / "omni")}
    omni_settings["lora"] = {"r": 2}
    omni_settings["train"] |= {"max_steps": 1, "lr": 0.1}
    code, _, err = train()
    assert code == 0, err
    adapters, merged = str(tmp_path / "out" / "hf"), str(tmp_path / "merged")
    assert main(["merge", adapters, merged]) == 0
    assert read_folder(merged).keys() == read_folder(tmp_path / "omni").keys()
    assert (tmp_path / "merged" / "spk_dict.pt").is_file()
    answers = []
    tone = next(tmp_path.rglob("*.wav"))
    for folder, media in (
        (adapters, []),
        (merged, []),
        (adapters, ["--audio", str(tone)]),
        (merged, ["--audio", str(tone)]),
    ):
        capsys.readouterr()
        given = ["generate", folder, "--prompt", "Which tone?", "--max-new-tokens", "4", "--device", "cpu"]
        assert main([*given, *media]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]


@pytest.mark.parametrize("given", [True, False])
def test_export_of_a_model_built_from_its_config_loads_in_transformers(omni_settings, tmp_path, train, given):
    """Transformers' class reads a file of speakers, also without the speech parts."""
    if given:
        torch.save({"Chelsie": {}}, tmp_path / "omni" / "spk_dict.pt")
    omni_settings["train"]["max_steps"] = 1
    code, out, err = train()
    assert code == 0, err
    assert ("has no spk_dict.pt" in out + err) is not given
    name = "Qwen2_5OmniForConditionalGeneration" if given else "Qwen2_5OmniThinkerForConditionalGeneration"
    assert given or f"load the export with {name}" in out + err
    model = getattr(transformers, name).from_pretrained(tmp_path / "out" / "hf")
    assert any(parameter.count_nonzero() for parameter in model.parameters())


def test_run_from_a_checkpoint_keeps_the_speech_parts(omni_settings, tmp_path, train):
    write_checkpoint_with_speech(tmp_path / "omni")
    omni_settings["model"] = {"model_path": str(tmp_path / "omni"), "export_excluded": True}
    omni_settings["train"] |= {"freeze": ["vision", "audio"]}
    code, out, err = train()
    assert code == 0, err
    assert "left out: talker (" in out
    assert "AutoModelForMultimodalLM" in out
    folder = tmp_path / "out" / "hf"
    assert read_folder(folder).keys() == read_folder(tmp_path / "omni").keys()
    assert type(load_processor(folder)).__name__ == "Qwen2_5OmniProcessor"


def test_learning_rates_of_parts_and_evaluation(omni_settings, tmp_path):
    omni_settings["data"]["eval_path"] = omni_settings["data"]["train_path"]
    rates = {"audio": 5e-4, "merger": 2e-3, "language_model": 1e-3}
    omni_settings["train"] |= {"lr_of": rates, "eval_steps": 1, "max_steps": 1, "lr_scheduler": "constant"}
    trainer = trainer_of(omni_settings, tmp_path)
    number = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    found = {number[id(p)]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    parts = parts_of(trainer.model)
    for part in ("audio", "merger", "language_model"):
        # The merger is in the encoder; the last entry counts.
        own = {*parts[part]} - ({*parts["merger"]} if part == "audio" else set())
        assert {found[name] for name in own} == {rates[part]}
    assert 0 < trainer.evaluate()["eval_loss"] < 10


@pytest.mark.quick("chat.jsonl-*")
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"array": [], "sampling_rate": 16_000}, "length zero"),
        ({"array": [0.5] * 300, "sampling_rate": 16_000}, r"0\.019 s, which is too short for a feature"),
        ("missing.wav", "cannot be read"),
        ({"array": [0.5] * 40_000, "sampling_rate": 16_000}, r"2\.5 s, of which the model gets the first 2\.0 s"),
        ("chat.jsonl", "not a 16-bit PCM WAV file|does not decode"),
    ],
)
def test_bad_audio_raises_or_is_counted(omni_settings, tmp_path, train, source, problem):
    import re

    write_lines(tmp_path / "samples" / "bad.jsonl", [talk("0.wav")] * 6 + [talk(source)])
    omni_settings["data"]["train_path"] = str(tmp_path / "samples" / "bad.jsonl")
    code, _, err = train()
    assert code == 2
    assert re.search(rf"bad.jsonl, line 7: .*({problem})", err)
    assert err.count("data.on_bad_sample: skip") == 1
    code, out, err = train("--data.on_bad_sample=skip")
    assert code == 0, err
    assert "1 samples left out: malformed" in out


@pytest.mark.quick("parquet")
@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_media_inside_the_data_file_train_as_paths_do(omni_settings, tmp_path, train, form):
    code, _, err = train()
    assert code == 0, err
    expected = [record["loss"] for record in read_metrics(tmp_path / "out")]
    folder = tmp_path / "samples"
    records = [json.loads(line) for line in (folder / "chat.jsonl").read_text().splitlines()]
    names = [[part["audio"] for part in record["messages"][0]["content"] if "audio" in part] for record in records]
    if form == "tar":
        with tarfile.open(folder / "chat.tar", "w") as archive:
            for number, (record, files) in enumerate(zip(records, names, strict=True)):
                text = json.dumps(record).replace(".wav", f".{number}.wav")
                for i in range(3):
                    text = text.replace(f'"{i}.{number}.wav', f'"{number}.{i}.wav')
                (folder / "record.json").write_text(text)
                archive.add(folder / "record.json", f"{number}.json")
                for file in files:
                    archive.add(folder / file, f"{number}.{file}")
    else:
        import pyarrow as pa
        import pyarrow.parquet

        for record, files in zip(records, names, strict=True):
            turn = record["messages"][0]
            turn["content"] = "<audio>" * len(files) + "Which tone?"
            record["audios"] = [{"bytes": (folder / file).read_bytes(), "path": file} for file in files]
        pa.parquet.write_table(pa.Table.from_pylist(records), folder / "chat.parquet")
    omni_settings["data"]["train_path"] = str(folder / f"chat.{form}")
    omni_settings["train"]["output_dir"] = str(tmp_path / "again")
    code, _, err = train()
    assert code == 0, err
    assert [record["loss"] for record in read_metrics(tmp_path / "again")] == expected


def test_placeholder_without_audio_raises(omni_settings, tmp_path, train):
    messages = [{"role": "user", "content": "listen: <|AUDIO|>"}, {"role": "assistant", "content": "A"}]
    write_lines(tmp_path / "samples" / "bad.jsonl", [messages])
    omni_settings["data"]["train_path"] = str(tmp_path / "samples" / "bad.jsonl")
    code, _, err = train()
    assert code == 2
    assert "bad.jsonl, line 1: Qwen2_5OmniProcessor rejects it" in err


def test_audio_for_a_model_without_raises(omni_settings, tmp_path, train):
    from tests.multimodal import write_model

    omni_settings["model"] = {"config_path": str(write_model(tmp_path / "vision"))}
    code, _, err = train()
    assert code == 2
    assert "has audio, which Qwen3VLProcessor cannot process" in err


def test_demo_configuration_is_valid(tmp_path):
    import random
    from pathlib import Path

    from demos.command import path_arguments
    from opslot.data.multimodal.audio import load_audio
    from opslot.trainer.validate import validate

    held_out = demo.DEMO.write_inputs(tmp_path, 20)
    assert len(held_out) == 120
    file = Path(__file__).parents[2] / "configs" / "omni_demo.yaml"
    validate(load_config([str(file), *path_arguments(tmp_path)]))
    (tmp_path / "data" / "media").mkdir(exist_ok=True)
    sample = demo._sample(random.Random(1), tmp_path / "data" / "media", "x")
    names = [part["audio"] for part in sample["messages"][0]["content"] if part["type"] == "audio"]
    assert load_audio(names[0], tmp_path / "data", 16_000).std() > 0.05
    right = sample["messages"][-1]["content"]
    page = demo.DEMO.write_page(tmp_path, [sample, sample], [right, "Z"], tmp_path / "none.png").read_text()
    assert "data:audio/wav;base64," in page
    assert "1 of 2 held-out questions are answered right" in page
    assert f"</p><b>{right}</b></div>" in page
    assert f"</p><s>Z</s> <b>{right}</b></div>" in page


@pytest.mark.parametrize(
    "changes",
    [{}, {"data_parallel_mode": "fsdp2"}, {"fsdp": {"param_dtype": "bfloat16"}}],
    ids=["one process", "fsdp2", "copies"],
)
def test_prompts_of_the_evaluation_with_audio(omni_settings, tmp_path, train, changes):
    """The sub-model generates, and the hooks that gather or copy its parameters are those of the model around it."""
    audio = str(write_wav(tmp_path / "tone.wav"))
    omni_settings["train"] |= {"eval_steps": 2, "max_steps": 2, **changes}
    prompts = [{"text": "Which tone?", "audios": [audio]}, "Which tone?"]
    omni_settings["evaluation"] = {"prompts": prompts, "max_new_tokens": 3}
    code, _, error = train()
    assert code == 0, error
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 2
