"""Adapters of LongCat's experts, some of which return their input and have no weights."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from opslot.checkpoint import save_adapter
from opslot.verify.tiny import tiny_config
from tests.trainer.adapters.runs import peft_losses, recorded_steps
from tests.trainer.runs import losses, run_config

# Experts that expert parallelism removes, since nothing reads their weights; they are saved as zeros.
UNREAD = re.compile(r"mlp\.experts\.[45]\.(gate|up)_proj")
EXPERTS = {"experts": True, "target_modules": ["q_b_proj", "o_proj"]}


@pytest.fixture
def longcat_base(settings, write, tmp_path):
    """Replaces the base by a random LongCat, with the vocabulary of the tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path / "longcat"
    config = tiny_config("longcat_flash")
    config.vocab_size = 260
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in (tmp_path / "base").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    settings["model"] = {"model_path": str(folder)}
    return folder


def test_losses_equal_those_of_peft(trainer, longcat_base, tmp_path):
    run = trainer("run", EXPERTS, lr_scheduler="constant", micro_batch_size=None)
    start = save_adapter(run.model, tmp_path / "start")
    steps = recorded_steps(run)
    run.train()
    expected = peft_losses(longcat_base, start, steps, run.config.train)
    found = losses(tmp_path / "run")
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] != pytest.approx(found[0], rel=1e-4)


def test_expert_parallelism_has_the_losses_of_one_process(ranks, write, longcat_base, tmp_path):
    lora = EXPERTS | {"merge": True}
    assert run_config(write("one", lora)) == 0
    assert ranks.run(run_config, write("two", lora, ep_size=2)) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    for file in ("adapter_model.safetensors", "merged/model.safetensors"):
        expected, found = (load_file(tmp_path / name / "hf" / file) for name in ("one", "two"))
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            if UNREAD.search(name):
                assert not found[name].any()
            else:
                torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resume_with_and_without_expert_parallelism(ranks, write, longcat_base, tmp_path, before, after):
    def run(name, processes, **changes):
        sizes = {"ep_size": 2} if processes == 2 else {}
        file = write(name, EXPERTS, lr_scheduler="constant", **changes, **sizes)
        assert (ranks.run(run_config, file) == [0, 0]) if processes == 2 else (run_config(file) == 0)

    run("straight", 1)
    run("split", before, max_steps=2)
    run("split", after, **{"checkpoint.resume_from": "latest"})
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_quantized_experts_are_one_error(ranks, write, longcat_base, ep_size):
    pytest.importorskip("bitsandbytes")
    file = write("run", EXPERTS | {"quantization": "nf4"}, ep_size=ep_size)
    if ep_size == 1:
        assert run_config(file) == 2
    else:
        # One rank reports it.
        assert sorted(ranks.run(run_config, file)) == [1, 2]
