import pytest
import torch
from torch import nn

from opslot._base.errors import KernelError
from opslot.ops.patch_embed.linear import linear
from opslot.ops.patch_embed.op import can_serve
from opslot.slots import BoundKernel

pytest.importorskip("transformers")

import opslot
from tests.models.test_host_inputs import batch_of, build


def bound(explicit=True):
    return BoundKernel("patch_embed", "standard", "linear", explicit, linear)


def test_weight_is_not_copied_and_patches_are_not_cut_again():
    """A copy of the weight would be one more tensor of its size in each step."""
    saved = []
    x, weight = torch.randn(5, 3, 2, 4, 4), torch.randn(8, 3, 2, 4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        linear(x, weight)
    assert set(saved) <= {x.data_ptr(), weight.data_ptr()}


def test_one_input_without_batch():
    x, weight = torch.randn(3, 8, 4), torch.randn(5, 3, 4, 4)
    torch.testing.assert_close(linear(x, weight), nn.functional.conv2d(x, weight, stride=4))


def test_inputs_smaller_than_a_patch_raise():
    with pytest.raises(KernelError, match=r"cannot take x: shape \(2, 3, 8, 3\), smaller than one patch"):
        linear(torch.randn(2, 3, 8, 3), torch.randn(5, 3, 4, 4))


def test_broadcast_bias_raises():
    with pytest.raises(KernelError, match=r"cannot take bias: shape \(1,\)"):
        linear(torch.randn(2, 3, 8, 4), torch.randn(5, 3, 4, 4), torch.randn(1))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 4, 4, stride=2),
        nn.Conv2d(3, 4, 4, stride=4, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(3, 4, 2, stride=2, dilation=2),
        nn.Linear(3, 4),
    ],
)
def test_other_modules_raise_or_run_themselves(conv):
    assert not can_serve(bound(explicit=False), conv)
    with pytest.raises(KernelError, match="patch_embed_implementation='linear'"):
        can_serve(bound(), conv)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_convolution_with_hooks_runs_itself(register):
    conv = nn.Conv2d(3, 4, 2, stride=2, padding="valid")
    assert can_serve(bound(), conv)
    getattr(conv, register)(lambda *_: None)
    assert not can_serve(bound(explicit=False), conv)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_tower_without_convolution(name, monkeypatch):
    torch.manual_seed(0)
    model, batch = build(name), batch_of(name)
    model.set_attn_implementation("eager")
    expected = model.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"]).pooler_output
    report = opslot.apply(model, {"preset": "eager", "patch_embed_implementation": "linear"})
    assert "patch_embed" in str(report)
    monkeypatch.setattr(nn.Conv3d, "forward", None)
    found = model.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"]).pooler_output
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
