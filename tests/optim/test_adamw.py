"""The optimizer with the kernel: the same state and results as torch, for all tensors."""

import copy
import functools

import pytest
import torch

from opslot._base.errors import KernelError

pytest.importorskip("triton")


@pytest.fixture
def optimizer_class(monkeypatch):
    """The class with larger tensors treated as on a GPU, so that the interpreter runs the kernel."""
    from opslot.optim import triton as module

    monkeypatch.setattr(module, "_on_gpu", lambda param: param.numel() > 4)
    return module.AdamW


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((17, 5), (3,), (33,))]


def train(optimizer, params, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.0)])
def test_equals_torch_over_many_steps(optimizer_class, betas):
    ours, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "betas": betas, "weight_decay": 0.1}
    train(optimizer_class(ours, **options), ours, 20)
    train(torch.optim.AdamW(theirs, fused=True, **options), theirs, 20)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_state_dicts_are_interchangeable_with_torch(optimizer_class):
    params = parameters()
    optimizer = optimizer_class(params, lr=1e-2)
    train(optimizer, params, 3)
    copied = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = torch.optim.AdamW(copied, lr=1e-2, fused=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, params, 3, seed=2)
    train(other, copied, 3, seed=2)
    for a, b in zip(params, copied, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_groups_dtypes_and_sizes_of_one_step_equal_torch(optimizer_class):
    """One launch has tensors of one dtype; sizes are below, at and above what one CTA updates."""
    shapes = (3, 16, 2048, 8192, 8193, 40_000)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator).to(dtype) for dtype in dtypes for n in shapes]
    results = []
    for kind in (optimizer_class, functools.partial(torch.optim.AdamW, fused=True)):
        params = [torch.nn.Parameter(value.clone()) for value in values]
        groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 1e-3, "weight_decay": 0.5}]
        optimizer = kind(groups, betas=(0.9, 0.95))
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step()
            optimizer = copy.copy(optimizer)
        results.append(params)
    for a, b in zip(*results, strict=True):
        tolerance = {"rtol": 2**-7, "atol": 1e-3} if a.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(a, b, **(tolerance if a.dtype != torch.float64 else {"rtol": 1e-12, "atol": 0.0}))


def test_state_with_gaps_raises_before_it_is_changed(optimizer_class):
    param = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = optimizer_class([param], lr=1e-2)
    train(optimizer, [param], 1)
    state = optimizer.state[param]
    state["exp_avg"] = torch.zeros(6, 8)[:, ::2]
    before = param.detach().clone()
    with pytest.raises(KernelError, match="exp_avg is not"):
        train(optimizer, [param], 1)
    assert torch.equal(param, before)
    assert state["step"] == 1


def test_gradients_are_kept_and_missing_ones_skipped(optimizer_class):
    params = parameters()
    optimizer = optimizer_class(params, lr=1e-2)
    train(optimizer, params, 1)
    params[2].grad = None
    before = params[2].detach().clone()
    optimizer.step()
    assert params[0].grad is not None
    assert torch.equal(params[2], before)


def test_closure_runs_before_the_step(optimizer_class):
    param = torch.nn.Parameter(torch.full((8,), 2.0))
    optimizer = optimizer_class([param], lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == 32.0
    assert losses == sorted(losses, reverse=True)


def test_step_hooks_run_once_also_with_a_torch_optimizer(optimizer_class):
    torch.optim.AdamW(parameters(), fused=True)
    params = parameters()
    optimizer = optimizer_class(params, lr=1e-2)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, params, 2)
    assert calls == ["before", "after"] * 2


def test_trainer_uses_the_named_kernel():
    import opslot
    from opslot.optim.selection import adamw_of
    from opslot.optim.triton import AdamW

    model = torch.nn.Linear(2, 2)
    opslot.bind(model, {"adamw_implementation": "triton"})
    assert adamw_of(model) is AdamW
    opslot.bind(model, "auto")
    assert adamw_of(model) is not AdamW


@pytest.mark.parametrize("steps", [1, 3, 400])
def test_slow_averages_are_exact_from_the_first_step(optimizer_class, steps):
    """1 - 0.999 in float32 has an error of 1e-5, and the first updates would too."""
    grad = torch.linspace(0.5, 2.0, 8)
    ours = torch.nn.Parameter(torch.zeros(8))
    optimizer = optimizer_class([ours], lr=1e-3, betas=(0.9, 0.999), eps=1e-12, weight_decay=0.0)
    ours.grad = grad
    # torch creates the state in its first step.
    optimizer.step()
    state = optimizer.state[ours]
    state["step"].fill_(steps - 1)
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()
    with torch.no_grad():
        ours.zero_()
    optimizer.step()
    wide = grad.double()
    mean, square = wide * (1 - 0.9), wide.square() * (1 - 0.999)
    update = 1e-3 * mean / (1 - 0.9**steps) / (square / (1 - 0.999**steps)).sqrt()
    torch.testing.assert_close(state["exp_avg_sq"].double(), square, rtol=2e-7, atol=0.0)
    torch.testing.assert_close(-ours.detach().double(), update, rtol=5e-7, atol=0.0)


@pytest.mark.parametrize("name", ["param", "exp_avg", "exp_avg_sq"])
def test_tensors_with_gaps_raise(name):
    """The kernel writes to consecutive elements, beyond the end of such a tensor."""
    from opslot.optim.triton import adamw

    tensors = {each: torch.zeros(4, 6) for each in ("param", "grad", "exp_avg", "exp_avg_sq")}
    tensors[name] = torch.zeros(4, 12)[:, ::2]
    with pytest.raises(KernelError, match=f"{name} is not"):
        adamw(**tensors, step=torch.ones(()), lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
