"""Models with kernels inside transforms of torch.func."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.func import functional_call, grad, vjp, vmap

import opslot
from opslot._base.errors import KernelError
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config

ALL_TRITON = {
    "attn_implementation": "triton",
    "cross_entropy_loss_implementation": "triton",
    "layer_norm_implementation": "triton",
}


def model_and_loss(arch, ops, adapt=None):
    config = tiny_config(arch)
    ids = random_ids(config)
    model = random_model(config)
    model = model if adapt is None else get_peft_model(model, adapt)
    opslot.apply(model, ops)

    def loss(parameters):
        return functional_call(model, parameters, (), {"input_ids": ids, "labels": ids, "use_cache": False}).loss

    return model, loss


def gradients(model, loss):
    loss(dict(model.named_parameters())).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("arch", "ops", "adapt"),
    [
        ("qwen3_moe", "auto", None),
        ("bert", {"preset": "eager", **ALL_TRITON}, None),
        # The head has parameters that only the module holds which its kernel gets.
        (
            "llama",
            {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"},
            LoraConfig(target_modules=["lm_head"], init_lora_weights=False),
        ),
    ],
    ids=["qwen3_moe", "bert", "lora"],
)
def test_gradients_of_transforms_equal_those_of_backward(arch, ops, adapt):
    model, loss = model_and_loss(arch, ops, adapt)
    expected = gradients(model, loss)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    trained = {name: parameters[name] for name in expected}
    whole, rest = (lambda own: loss(parameters | own)), {name: trained[name] for name in [*trained][:2]}
    _, pull = vjp(whole, trained)
    for found in (grad(whole)(trained), *pull(torch.ones(())), grad(whole)(rest)):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])


def test_gradients_of_single_samples_raise():
    model, _ = model_and_loss("llama", "auto")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, ids):
        return functional_call(model, parameters, (), {"input_ids": ids[None], "labels": ids[None]}).loss

    with pytest.raises(KernelError, match=r"failed inside torch\.func \(vmap, jvp"):
        vmap(grad(loss), in_dims=(None, 0))(parameters, random_ids(model.config))
