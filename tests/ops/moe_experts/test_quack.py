"""What surrounds the GEMMs of fused_quack: routing, gradients, custom ops. With GEMMs of PyTorch, on a CPU."""

import importlib
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from opslot.ops.moe_experts import op
from opslot.verify.parity import poisoned_memory

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 37, 5, 2, 16, 24


def slices(cumulated):
    bounds = cumulated.tolist()
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def gemm(a, b, out, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None, **options):
    """For each expert, its rows of `a` times its matrix, or the product over its rows."""
    if cu_seqlens_m is not None:
        rows = a if A_idx is None else a[A_idx]
        for expert, at in enumerate(slices(cu_seqlens_m)):
            out[at] = rows[at] @ b[expert]
    else:
        columns = a[:, A_idx]
        for expert, at in enumerate(slices(cu_seqlens_k)):
            out[expert] = columns[:, at] @ b[at]


def gemm_gated(a, b, projected, act, **options):
    gemm(a, b, projected, **options)
    gate, up = projected.float().chunk(2, -1)
    act.copy_(silu(gate) * up)


def gemm_dgated(a, b, projected, projected_grad, weighted_act, colvec_scale=None, **options):
    grad = torch.empty(projected.shape[0], b.shape[2], dtype=a.dtype)
    gemm(a, b, grad, **options)
    with torch.enable_grad():
        parts = projected.float().requires_grad_()
        gate, up = parts.chunk(2, -1)
        act = silu(gate) * up
        (gradient,) = torch.autograd.grad(act, parts, grad.float() * colvec_scale[:, None])
    projected_grad.copy_(gradient)
    weighted_act.copy_(act.detach() * colvec_scale[:, None])
    return (grad.float() * act.detach()).sum(-1)


def gemm_act(a, b, activation, preact_out, postact_out, **options):
    gemm_gated(a, b, preact_out, postact_out, **options)
    return preact_out, postact_out


def gemm_dact(a, b, projected, activation, dx_out, postact_out, **options):
    return dx_out, postact_out, gemm_dgated(a, b, projected, dx_out, postact_out, **options)


GATED = {
    "before 0.6.2": {
        "gemm_gated_tuned": SimpleNamespace(fn=gemm_gated),
        "gemm_dgated_tuned": SimpleNamespace(fn=gemm_dgated),
    },
    "0.6.2 and later": {"gemm_act": gemm_act, "gemm_dact": gemm_dact},
}


@pytest.fixture(scope="module")
def quack_module():
    quack, interface, config = (ModuleType(name) for name in ("quack", "quack.gemm_interface", "quack.gemm_config"))
    quack.gemm_interface, config.GemmConfig = interface, SimpleNamespace
    name = "opslot.ops.moe_experts.quack"
    if torch.cuda.is_available():
        pytest.skip("test_all_kernels runs quack's own GEMMs")
    with pytest.MonkeyPatch.context() as context:
        for module in (quack, interface, config):
            context.setitem(sys.modules, module.__name__, module)
        yield importlib.import_module(name)


@pytest.fixture(params=GATED)
def fused_quack(quack_module, request, monkeypatch):
    functions = SimpleNamespace(gemm_tuned=SimpleNamespace(fn=gemm), **GATED[request.param])
    monkeypatch.setattr(quack_module, "gemm_interface", functions)
    return quack_module.standard


@pytest.mark.parametrize("needs", [(True,) * 4, (True, False, False, True), (False, True, True, False)])
def test_outputs_and_gradients(fused_quack, needs):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = (
        normal(TOKENS, HIDDEN),
        normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * 0.2,
        normal(EXPERTS, HIDDEN, INTERMEDIATE) * 0.2,
        torch.rand(TOKENS, TOP_K, generator=generator),
    )
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    grad = normal(TOKENS, HIDDEN)

    def run(function, dtype):
        x, gate_up, down, weights = (
            tensor.to(torch.bfloat16).to(dtype).requires_grad_(need)
            for tensor, need in zip(tensors, needs, strict=True)
        )
        out = function(x, gate_up, down, index, weights)
        out.backward(grad.to(dtype))
        return [out, *(tensor.grad for tensor in (x, gate_up, down, weights))]

    exact, eager = run(op.standard, torch.float64), run(op.standard, torch.bfloat16)
    with poisoned_memory():
        found = run(fused_quack, torch.bfloat16)
    for wanted, reference, result in zip(exact, eager, found, strict=True):
        assert (wanted is None) == (result is None)
        if wanted is not None:
            assert (result - wanted).norm() <= 2 * (reference - wanted).norm()
