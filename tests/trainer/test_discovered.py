"""Training architectures whose slots discovery finds."""

import json

import pytest
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}


@pytest.fixture
def of(settings, tmp_path, tokenizer):
    """Changes `settings` to another model type."""

    def of(model_type, **sizes):
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **sizes}))
        tokenizer.save_pretrained(folder)
        settings["model"]["config_path"] = str(folder)

    return of


def test_mixture_of_experts_trains_on_packed_documents(train, of, settings, tmp_path):
    of("mixtral", num_local_experts=4, num_experts_per_tok=2)
    settings["train"]["max_steps"] = 12
    code, out, _ = train()
    assert code == 0
    assert "MixtralExperts" in out
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.8 * losses[0]
    _, loading_info = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf", output_loading_info=True)
    assert not any(loading_info.values()), loading_info


def test_packing_raises_where_documents_could_see_each_other(train, of, settings):
    of("gpt_neox_japanese")
    code, _, err = train()
    assert code == 2
    assert "GPTNeoXJapaneseForCausalLM cannot train on packed documents, which would see each other" in err
    assert "found: it has no decoder layers" in err
    assert "hint: set data.packing: false" in err
    settings["data"]["packing"] = False
    assert train()[0] == 0


def test_model_that_sees_the_labels_raises(train, of):
    of("bert")
    code, _, err = train()
    assert code == 2
    assert "BertLMHeadModel is not a causal language model, which task pretrain trains" in err
    assert "found: BertLayer attends to later tokens, since is_decoder is false in its config" in err
    of("gemma3_text", use_bidirectional_attention=True)
    assert (
        "found: it attends to later tokens, since use_bidirectional_attention is set in its gemma3_text" in train()[2]
    )


DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}


def with_vision(name, **sizes):
    """Config with a vision tower, as in checkpoints on the Hub."""
    text = SIZES | DELTA | sizes | {"model_type": f"{name}_text"}
    return {"text_config": text, "vision_config": VISION}


@pytest.mark.quick("qwen3_5-sizes0")
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("qwen3_5", {"architectures": ["Qwen3_5ForConditionalGeneration"], **with_vision("qwen3_5")}),
        (
            "qwen3_5_moe",
            {"architectures": ["Qwen3_5MoeForConditionalGeneration"], **with_vision("qwen3_5_moe", **EXPERTS)},
        ),
    ],
)
def test_vision_language_model_with_linear_attention_trains_on_packed_texts(train, of, settings, model_type, sizes):
    of(model_type, **sizes)
    settings["train"] |= {"max_steps": 2, "eval_steps": 2}
    settings["data"]["sample_by"] = "line"
    packed = {}, {"max_tokens_per_batch": 64}
    for number, data in enumerate([*packed, {"max_tokens_per_batch": None, "packing": False}]):
        settings["data"] |= data
        settings["train"]["output_dir"] += str(number)
        code, out, err = train()
        assert code == 0, err
        assert "load it with: AutoModelForImageTextToText.from_pretrained(" in out


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("qwen3_next", DELTA | EXPERTS), ("qwen3_5_text", DELTA), ("qwen3_5_moe_text", DELTA | EXPERTS)],
)
def test_linear_attention_trains_packed(train, of, settings, model_type, sizes):
    of(model_type, **sizes)
    settings["train"] |= {"max_steps": 2, "eval_steps": 2}
    code, out, err = train()
    assert "Traceback" not in err
    assert code == 0
    assert "load it with: AutoModelForCausalLM.from_pretrained(" in out
