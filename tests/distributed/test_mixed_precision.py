"""Mixed precision in one process, without FSDP."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import opslot
from opslot._base.errors import ConfigError
from opslot.distributed import offload, reload
from opslot.distributed.mixed_precision import can_copy_parameters, compute_with_copies
from tests.distributed import tiny

BF16 = torch.bfloat16


def loss_of(model, step=0):
    return model(**tiny.rows(step), use_cache=False).loss


def parallelized(name="qwen3_moe", **options):
    return opslot.parallelize(tiny.build(name, "eager"), param_dtype=BF16, **options)


def reference(model):
    """The same weights in bfloat16, without copies."""
    other = tiny.build(model.config.model_type, "eager")
    other.load_state_dict(model.state_dict())
    for parameter in other.parameters():
        parameter.data = parameter.data.to(BF16)
    return other


def assert_gradients_equal(model, expected):
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, other.grad.float()), name


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_equal_to_a_model_in_bfloat16_bit_for_bit(checkpointing):
    model = parallelized(activation_checkpointing=checkpointing)
    expected = reference(model)
    loss, wanted = loss_of(model), loss_of(expected)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    loss.backward()
    wanted.backward()
    assert torch.equal(loss, wanted)
    assert_gradients_equal(model, expected)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_deleted_model_is_freed():
    model = parallelized()
    loss_of(model).backward()
    copies = model.__dict__["_mixed_precision_copies"]._copies.values()
    references = [weakref.ref(x) for x in (model, next(iter(copies)), next(model.parameters()))]
    del model, copies
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_updates_of_the_optimizer_reach_the_next_forward_pass():
    model = parallelized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        expected = reference(model)
        loss = loss_of(model, step)
        assert torch.equal(loss, loss_of(expected, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_of_several_forward_passes_are_added_in_float32():
    model = parallelized("qwen3")
    gradients = []
    for step in range(2):
        expected = reference(model)
        loss_of(expected, step).backward()
        gradients.append([p.grad.float() for p in expected.parameters()])
    losses = [loss_of(model, step) for step in range(2)]
    for loss in losses:
        loss.backward()
    for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
        assert torch.equal(parameter.grad, parts[0] + parts[1])


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pass_that_raised_leaves_nothing_behind(error, phase):
    model = parallelized("qwen3")

    def fail(*_):
        raise error

    last = model.model.norm
    handle = last.register_forward_hook(lambda module, args, out: fail() if phase == "forward" else hooked(out))

    def hooked(out):
        out.register_hook(fail)
        return out

    with pytest.raises(type(error)):
        loss_of(model).backward()
    handle.remove()
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.state_dict().values():
            parameter.mul_(0.9)
    loss = loss_of(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected = reference(model)
    wanted = loss_of(expected)
    assert torch.equal(loss, wanted)
    loss.backward()
    wanted.backward()
    assert_gradients_equal(model, expected)


def test_a_hook_that_raises_before_the_copies_are_placed():
    model = parallelized("qwen3")
    expected = loss_of(model)

    def fail(*_):
        raise ValueError

    handle = model.model.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ValueError):
        loss_of(model)
    handle.remove()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(loss_of(model), expected)


def test_frozen_and_tied_parameters():
    model = parallelized("qwen3", activation_checkpointing="full")
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[0].requires_grad_(False)
    expected = reference(model)
    expected.lm_head.weight = expected.model.embed_tokens.weight
    loss_of(model).backward()
    loss_of(expected).backward()
    assert all(p.grad is None for p in model.model.layers[0].parameters())
    assert torch.equal(model.lm_head.weight.grad, expected.lm_head.weight.grad.float())


def test_a_copied_model_trains_its_own_parameters():
    model = parallelized("qwen3")
    loss_of(model).backward()
    model.zero_grad()
    other = copy.deepcopy(model)
    loss_of(other).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


def test_the_base_model_computes_in_16_bits_too():
    model = parallelized("qwen3")
    batch = tiny.rows(0)
    hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    assert hidden.dtype == BF16
    hidden.float().sum().backward()
    assert model.model.norm.weight.grad.dtype == torch.float32


def test_training_after_inference_mode():
    model = parallelized("qwen3")
    with torch.inference_mode():
        evaluated = loss_of(model)
    loss = loss_of(model)
    loss.backward()
    assert torch.equal(loss, evaluated)
    assert all(p.grad is not None for p in model.parameters())
    with torch.inference_mode():
        assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False).shape == (1, 4)


def test_inputs_are_cast():
    model = nn.Linear(4, 4)
    compute_with_copies(model, BF16)
    assert model(torch.ones(2, 4)).dtype == BF16


def test_offloading_releases_the_copies():
    model = parallelized("qwen3")
    loss = loss_of(model)
    offload(model)
    reload(model)
    assert torch.equal(loss_of(model), loss)


def test_parallelize_twice_raises():
    with pytest.raises(ConfigError, match="is parallelized already"):
        opslot.parallelize(parallelized("qwen3"), param_dtype=BF16)


def test_only_what_is_cast_counts_as_memory(monkeypatch):
    device = torch.device("cuda")
    memory = type("Properties", (), {"total_memory": 20 * 2 * 100})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    model = nn.Sequential(nn.Linear(9, 10, bias=False), nn.Linear(10, 100, bias=False).to(BF16))
    assert can_copy_parameters(model.parameters(), BF16, device)
    model.append(nn.Linear(11, 1, bias=False))
    assert not can_copy_parameters(model.parameters(), BF16, device)
