"""`opslot train` with model classes that ship with a checkpoint."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.own_code import ship

SIZES = {"vocab_size": 260, "intermediate_size": 32}


@pytest.mark.parametrize(("name", "module"), [("sparrow", "RootScale"), ("finch", "FinchExperts")])
def test_trains_on_packed_documents_and_exports_the_code(
    train, settings, tmp_path, tokenizer, modules_cache, name, module
):
    folder = ship(name, tmp_path / name, **SIZES)
    tokenizer.save_pretrained(folder)
    settings["model"] = {"config_path": str(folder), "trust_remote_code": True}
    settings["train"]["max_steps"] = 8
    code, out, err = train()
    assert code == 0, err
    assert module in out
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.9 * losses[0]
    exported = tmp_path / "out" / "hf"
    assert (exported / f"modeling_{name}.py").read_text() == (folder / f"modeling_{name}.py").read_text()
    loaded, info = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.isfinite(loaded(torch.arange(8)[None]).logits).all()


def test_packing_raises_for_masks_of_a_models_own(train, settings, tmp_path, tokenizer, modules_cache):
    folder = ship("wren", tmp_path / "wren", **SIZES)
    tokenizer.save_pretrained(folder)
    settings["model"] = {"config_path": str(folder), "trust_remote_code": True}
    code, _, err = train()
    assert code == 2
    assert "WrenAttention calls scaled_dot_product_attention, which may mix tokens" in err
    settings["data"]["packing"] = False
    code, _, err = train()
    assert code == 0, err
