"""`opslot data preview` and `opslot generate`."""

import json
import math
import re
import shutil

import pytest
import torch

from opslot.cli import main
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from tests.chat import write_chat_model

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}


@pytest.fixture
def model(tmp_path, tokenizer):
    folder = tmp_path / "model"
    write_chat_model(folder, tokenizer, QWEN3)
    return folder


@pytest.fixture
def arguments(model, tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 6)
    paths = ["--model.config_path", str(model), "--data.train_path", str(tmp_path / "chat.jsonl")]
    return ["--task", "sft", *paths, "--data.max_seq_len", "64", "--data.cache_dir", str(tmp_path / "cache")]


def test_trained_parts_are_marked(arguments, capsys):
    assert main(["data", "preview", *arguments, "--samples", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("u:hi<eos>a:[[hello<eos>]]") == 2
    assert "trained:" in out
    assert "(46.2%)" in out
    assert re.search(r"^micro batch 1: 4\d\d tokens \(at most 512\) in 3\d documents of 13, 13", out, re.M)
    assert re.search(r"^loader: [\d,]+ samples/s, [\d,]+ tokens/s with 0 workers$", out, re.M)


def test_preview_with_color_and_as_tokens(arguments, capsys):
    assert main(["data", "preview", *arguments, "--samples", "1", "--color", "always"]) == 0
    assert "u:hi<eos>a:\033[1;32mhello<eos>\033[0m" in capsys.readouterr().out
    assert main(["data", "preview", *arguments, "--samples", "1", "--tokens"]) == 0
    assert "u : h i <eos> a : [[h e l l o <eos>]]" in capsys.readouterr().out


def test_preview_of_text_and_labels(arguments, tmp_path, capsys):
    (tmp_path / "labels.jsonl").write_text('{"text": "abc", "label": 1}\n{"text": "de", "label": 0}\n')
    arguments[arguments.index(str(tmp_path / "chat.jsonl"))] = str(tmp_path / "labels.jsonl")
    arguments[1] = "classification"
    assert main(["data", "preview", *arguments, "--samples", "2"]) == 0
    out = capsys.readouterr().out
    assert "ab[[c=1]]" in out
    assert "d[[e=0]]" in out
    arguments[1] = "pretrain"
    assert main(["data", "preview", *arguments, "--samples", "1"]) == 0
    assert "d[[e<eos>]]" in capsys.readouterr().out


def test_preview_reports_what_train_reports(arguments, tmp_path, capsys):
    (tmp_path / "chat.jsonl").write_text('{"question": "x"}\n')
    assert main(["data", "preview", *arguments]) == 2
    assert "it has question, and task sft needs messages" in capsys.readouterr().err
    assert main(["data", "preview", *arguments, "--data.max_seq_length", "3"]) == 2
    assert "use data.max_seq_len" in capsys.readouterr().err


def test_generate_applies_the_chat_template(model, tmp_path, capsys):
    from opslot.checkpoint import export_hf
    from opslot.data.tokenizer import load_tokenizer
    from opslot.models import build_foundation_model

    export_hf(build_foundation_model(model), tmp_path / "export", processors=[load_tokenizer(model)])
    options = ["--max-new-tokens", "3", "--device", "cpu"]
    assert main(["generate", str(tmp_path / "export"), "--prompt", "hi", *options]) == 0
    chat = capsys.readouterr().out
    assert main(["generate", str(tmp_path / "export"), "--prompt", "u:hi<eos>a:", "--raw", *options]) == 0
    assert capsys.readouterr().out == chat
    assert main(["generate", str(model / "none"), "--prompt", "x"]) == 2
    assert main(["generate", str(model), "--prompt", "x"]) == 2
    assert "is not a checkpoint that can generate" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "export"), "--prompt", "", "--raw", *options]) == 2
    assert "--prompt is empty, and the model needs a token to continue from" in capsys.readouterr().err


def test_generate_rejects_missing_weights_and_classifiers(model, tmp_path, capsys):
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model, tie_word_embeddings=False)
    for cls, message in (
        (AutoModel, "found: no weights for lm_head.weight"),
        (AutoModelForSequenceClassification, "has a classifier, which generates no text"),
    ):
        folder = tmp_path / cls.__name__
        shutil.copytree(model, folder)
        cls.from_config(config).save_pretrained(folder)
        assert main(["generate", str(folder), "--prompt", "hi", "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model.safetensors", "", "is not a checkpoint that can generate"),
        ("chat_template.jinja", "{% if x %}", "--prompt: the chat template rejects it: Unexpected end of template"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "--prompt: the chat template rejects it: no"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id in generation_config.json is not an id"),
    ],
)
def test_generate_rejects_damaged_files(model, tmp_path, capsys, file, text, message):
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, tmp_path / "m")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / file).write_text(text)
    assert main(["generate", str(tmp_path / "m"), "--prompt", "hi", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "hint: " in error


@pytest.fixture
def adapter(model, tmp_path):
    """As PEFT saves it: without a tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_generate_with_adapters_takes_the_tokenizer_of_the_base(model, adapter, capsys):
    options = ["--prompt", "hi", "--max-new-tokens", "2", "--device", "cpu"]
    assert main(["generate", str(adapter), *options]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("adapter_config.json, not JSON", "adapter_config.json is not valid JSON"),
        ("adapter_config.json, a list", "adapter_config.json is not a config of adapters"),
        ("adapter_config.json, a base that is a number", "found: base_model_name_or_path is not text"),
        (
            "adapter_config.json, alpha NaN",
            "have no finite scale\n  found: lora_alpha",
        ),
        ("adapter_config.json, an invalid pattern", "cannot be read, or do not fit the model"),
        ("adapter_model.safetensors, empty", "cannot be read, or do not fit the model"),
        ("adapter_model.safetensors, a tensor less", "are incomplete\n  found: no values for model.layers.0."),
    ],
)
def test_merge_rejects_damaged_adapters(adapter, tmp_path, capsys, damage, message):
    from safetensors.torch import load_file, save_file

    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    whole, tensors = json.loads(config.read_text()), load_file(weights)
    match damage.partition(", ")[2]:
        case "not JSON":
            config.write_text("{")
        case "a list":
            config.write_text("[]")
        case "a base that is a number":
            config.write_text(json.dumps(whole | {"base_model_name_or_path": 3}))
        case "alpha NaN":
            config.write_text(json.dumps(whole | {"lora_alpha": math.nan}))
        case "an invalid pattern":
            config.write_text(json.dumps(whole | {"target_modules": "("}))
        case "empty":
            weights.write_bytes(b"")
        case "a tensor less":
            tensors.popitem()
            save_file(tensors, weights)
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_generate_where_the_forward_of_transformers_raises(tmp_path, tokenizer, capsys):
    config = tiny_config("llama4")
    config.text_config.vocab_size = 260
    random_model(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "hi", "--max-new-tokens", "2", "--device", "cpu"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("option", [("--max-new-tokens", "0"), ("--temperature", "-1"), ("--temperature", "nan")])
def test_generate_rejects_values_out_of_range(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "folder", "--prompt", "hi", *option])
    assert f"argument {option[0]}" in capsys.readouterr().err


def test_generate_with_a_multimodal_checkpoint(tmp_path, capsys):
    """Whose type has no language model of its own; the answer is that of its class and its processor's tokens."""
    from transformers import AutoConfig, LlavaForConditionalGeneration

    from tests.processors import write_checkpoint

    processor = write_checkpoint(tmp_path, "llava")
    torch.manual_seed(0)
    theirs = LlavaForConditionalGeneration._from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    theirs.save_pretrained(tmp_path)
    options = ["--prompt", "what?", "--max-new-tokens", "4", "--device", "cpu"]
    assert main(["generate", str(tmp_path), *options]) == 0
    messages = [{"role": "user", "content": [{"type": "text", "text": "what?"}]}]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    output = theirs.generate(**inputs, max_new_tokens=4, do_sample=False)
    answer = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert capsys.readouterr().out == f"{answer}\n"
