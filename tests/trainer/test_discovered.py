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
    """`settings` with a model of another type."""

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
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf", output_loading_info=True)
    assert not any(told.values()), told


def test_documents_that_could_attend_to_each_other_are_not_packed(train, of, settings):
    of("gemma3_text", head_dim=8)
    code, _, err = train()
    assert code == 2
    assert "documents packed into one row could see each other in Gemma3ForCausalLM: its masks are not only causal" in err
    assert "set data.packing to false" in err
    settings["data"]["packing"] = False
    assert train()[0] == 0
