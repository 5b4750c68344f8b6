import copy

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.errors import KernelError
from opslot.models.discovery import discover
from opslot.ops.unbind_qkv import op

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

import opslot
from opslot.verify.tiny import tiny_config
from tests.models.test_host_inputs import batch_of, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernel():
    return KERNEL_REGISTRY.load("unbind_qkv", "standard", "triton")


@pytest.mark.parametrize("shape", [(7, 3, 2, 12), (2, 5, 3, 4, 8)])
def test_results_are_views_and_the_gradient_is_one_copy(shape):
    rows = torch.randn(*shape[:-3], 3 * shape[-2] * shape[-1], device=DEVICE, requires_grad=True)
    parts, expected = (function(rows.view(shape)) for function in (kernel(), op.standard))
    assert {part.untyped_storage().data_ptr() for part in parts} == {rows.untyped_storage().data_ptr()}
    # Of other strides, as those of attention are.
    douts = [torch.randn(*x.shape[:-1], 2 * x.shape[-1], device=DEVICE)[..., : x.shape[-1]] for x in parts]
    (found,), (wanted,) = (torch.autograd.grad(outs, rows, douts) for outs in (parts, expected))
    assert torch.equal(found, wanted)
    assert found.is_contiguous()


@pytest.mark.parametrize("lead", [(7,), (2, 5)])
def test_slices_are_views_and_their_gradient_is_one_copy(lead):
    sliced = KERNEL_REGISTRY.load("unbind_qkv", "sliced", "triton")
    qkv = torch.randn(*lead, (4 + 2 + 2) * 12, device=DEVICE, requires_grad=True)
    parts, expected = (function(qkv, 48, 72, 12) for function in (sliced, op.sliced))
    assert {part.untyped_storage().data_ptr() for part in parts} == {qkv.untyped_storage().data_ptr()}
    douts = [torch.randn(*x.shape[:-1], 2 * x.shape[-1], device=DEVICE)[..., : x.shape[-1]] for x in parts]
    (found,), (wanted,) = (torch.autograd.grad(outs, qkv, douts) for outs in (parts, expected))
    assert all(map(torch.equal, parts, expected))
    assert torch.equal(found, wanted)
    assert found.is_contiguous()


def test_slices_beyond_the_tensor_raise():
    sliced = KERNEL_REGISTRY.load("unbind_qkv", "sliced", "triton")
    with pytest.raises(KernelError, match="unbind_qkv_implementation='triton' cannot take qkv: its shape is"):
        sliced(torch.randn(5, 48), 24, 48, 12)


@pytest.mark.parametrize("arch", ["phi3", "phi4_multimodal"])
def test_sliced_projections_are_found(arch):
    assert "unbind_qkv/sliced" in map(str, discover(arch).matches)


def test_decoder_trains_like_the_original():
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(tiny_config("phi3")).to(DEVICE)
    model = copy.deepcopy(original)
    opslot.apply(model, {"preset": "eager", "unbind_qkv_implementation": "triton"})
    ids = torch.randint(3, 48, (2, 9), device=DEVICE)
    for each in (original, model):
        each(ids, labels=ids).loss.backward()
    assert opslot.explain(model).chosen("unbind_qkv") == ("triton",)
    # The kernel only copies, so nothing is rounded.
    for (name, found), wanted in zip(model.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad), name


def test_unused_part_has_a_gradient_of_zero():
    qkv = torch.randn(5, 3, 2, 8, device=DEVICE, requires_grad=True)
    q, _, v = kernel()(qkv)
    (q.sum() + 2.0 * v.sum()).backward()
    assert [qkv.grad[:, i].unique().tolist() for i in range(3)] == [[1.0], [0.0], [2.0]]


def test_compiles_with_fullgraph():
    qkv = torch.randn(5, 3, 2, 8, device=DEVICE, requires_grad=True)

    unbind = kernel()

    def loss(qkv):
        q, k, v = unbind(qkv)
        return (q * k).sum() + v.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(torch.autograd.grad(f(qkv), qkv) for f in (compiled, loss)))


@pytest.mark.parametrize("shape", [(3, 2, 8), (5, 4, 2, 8)])
def test_other_shapes_raise(shape):
    with pytest.raises(KernelError, match="unbind_qkv_implementation='triton' cannot take qkv: its shape is"):
        kernel()(torch.randn(shape))


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "modernbert"])
def test_fused_projections_are_found(arch):
    assert [match.op for match in discover(arch).matches].count("unbind_qkv") == 1


def test_tower_trains_like_the_original():
    torch.manual_seed(0)
    model, batch = build("qwen3_vl"), batch_of("qwen3_vl")
    model.set_attn_implementation("eager")
    tower = model.model.visual

    def gradients():
        tower.zero_grad()
        tower(batch["pixel_values"], grid_thw=batch["image_grid_thw"]).pooler_output.square().sum().backward()
        return {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}

    expected = gradients()
    opslot.apply(model, {"preset": "eager", "unbind_qkv_implementation": "triton"})
    assert opslot.explain(model).chosen("unbind_qkv") == ("triton",)
    found = gradients()
    assert found.keys() == expected.keys()
    # The kernel only copies, so nothing is rounded.
    assert all(torch.equal(found[name], expected[name]) for name in expected)
