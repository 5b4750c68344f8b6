"""A rank whose batch lacks a modality runs the same collectives as the others, with zero gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opslot.distributed import dummy_forward, init_parallel_state, shard_model


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Encoder(nn.Module):
    """Returns a mapping of several tensors, like Transformers' encoders."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(6), Block(6)])

    def forward(self, pixels):
        first = self.blocks[0](pixels)
        return {"last": self.blocks[1](first), "deep": [first], "grid": pixels.shape[0]}


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = Encoder()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(6), Block(6)])

    def forward(self, ids, pixels=None):
        x = self.embed(ids)
        if pixels is None:
            x = x + dummy_forward(self.visual, torch.zeros(1, 6))
        else:
            seen = self.visual(pixels)
            x = torch.cat([x[: -len(pixels)], seen["last"] + seen["deep"][0]])
        for block in self.blocks:
            x = block(x)
        return x


def model_and_batches(frozen):
    torch.manual_seed(0)
    model = TwoTowers()
    model.visual.requires_grad_(not frozen)
    return model, [(torch.tensor([3, 1, 4, 1]), torch.randn(2, 6)), (torch.tensor([5, 9, 2]), None)]


def gradients(model):
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def on_ranks(frozen, param_dtype):
    state = init_parallel_state(device_type="cpu")
    model, batches = model_and_batches(frozen)
    shard_model(model, state, layers=["Block", "Encoder"], param_dtype=param_dtype)
    model(*batches[state.rank % 2]).pow(2).sum().backward()
    return {name: grad.tolist() for name, grad in gradients(model).items()}


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_equal_those_of_one_process(ranks, frozen):
    model, batches = model_and_batches(frozen)
    for batch in batches:
        model(*batch).pow(2).sum().backward()
    expected = gradients(model)
    assert frozen or expected["visual.blocks.0.linear.weight"].abs().max() > 0.1
    for found in ranks.run(on_ranks, frozen, None):
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            torch.testing.assert_close(torch.tensor(grad), expected[name])


def test_dummy_inputs_are_cast_to_param_dtype(ranks):
    wide, narrow = (ranks.run(on_ranks, False, dtype)[0] for dtype in (None, torch.bfloat16))
    for name, grad in wide.items():
        difference = torch.tensor(narrow[name]) - torch.tensor(grad)
        assert 0 < difference.norm() < 8 * 2**-8 * torch.tensor(grad).norm()


def test_dummy_forward_on_all_ranks():
    """The result is zero for any module output, and so are the gradients."""
    model, _ = model_and_batches(False)
    zero = dummy_forward(model.visual, torch.randn(3, 6))
    assert zero.shape == ()
    assert zero == 0
    zero.backward()
    assert not any(p.grad.any() for p in model.visual.parameters())
