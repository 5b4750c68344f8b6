import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import opslot
from opslot._base.device import DeviceFacts
from opslot._base.errors import ConfigError
from opslot.ops.linear import fp8
from opslot.ops.linear.op import OP
from opslot.slots import KERNEL_REGISTRY, KernelRequest, KernelSpec
from opslot.verify.tiny import tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_of(arch="qwen3_moe", ops="fp8", **changes):
    torch.manual_seed(0)
    config = tiny_config(arch)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    opslot.apply(model, ops)
    return model


def loss_and_gradients(model):
    ids = torch.randint(3, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def test_preset_binds_linear_layers_without_heads_and_routers():
    model = model_of()
    (row,) = [row for row in opslot.explain(model) if row.op == "linear"]
    assert (row.variant, row.kernel) == ("standard", "fp8")
    linears = {path for path, m in model.named_modules() if type(m) is nn.Linear}
    assert set(row.modules) == linears - {"lm_head"}
    assert not any("router" in path or path.endswith("mlp.gate") for path in row.modules)


def test_projections_to_or_from_few_values_keep_their_dtype():
    """Such as the decays of a gated delta net, which are exponentiated, and LoRA."""
    config = tiny_config("qwen3_5_text")
    config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads = 96, 2, 6
    config.linear_key_head_dim = config.linear_value_head_dim = 16
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    opslot.apply(model, "fp8")
    (row,) = [row for row in opslot.explain(model) if row.op == "linear"]
    layer = "model.layers.0.linear_attn"
    assert {f"{layer}.in_proj_qkv", f"{layer}.in_proj_z", f"{layer}.out_proj"} <= set(row.modules)
    assert not {f"{layer}.in_proj_a", f"{layer}.in_proj_b"} & set(row.modules)
    for inputs, outputs, variant in [
        (4096, 32, "head"),
        (16, 4096, "head"),
        (4096, 1, "head"),
        (4096, 128, "standard"),
    ]:
        assert OP.applies_to(nn.Linear(inputs, outputs, device="meta"), None) == variant


class _Net(nn.Module):
    """A model with a config that is not Transformers'."""

    def __init__(self):
        super().__init__()
        self.config = {"width": 16}
        self.up = nn.Linear(16, 32)


@pytest.mark.parametrize(("ops", "kernels"), [("auto", []), ("fp8", ["fp8"])])
def test_models_with_another_kind_of_config_bind(ops, kernels):
    model = _Net().to(DEVICE)
    opslot.bind(model, ops)
    assert [row.kernel for row in opslot.explain(model) if row.op == "linear"] == kernels


def test_trains_like_the_exact_model():
    exact, rounded = model_of(ops="auto"), model_of()
    (loss, gradients), (found_loss, found) = map(loss_and_gradients, (exact, rounded))
    assert found_loss == pytest.approx(loss, rel=0.01)
    assert found_loss != loss
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        cosine = nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.9, name


def test_projections_of_one_input_share_its_rounding(monkeypatch):
    calls = []
    quantized = fp8._quantized
    monkeypatch.setattr(fp8, "_quantized", lambda x, *how: (calls.append(tuple(x.shape)), quantized(x, *how))[1])
    x = torch.randn(32, 16, device=DEVICE)
    weights = [torch.randn(48, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    first = [fp8.standard(x, weight) for weight in weights]
    assert calls.count((32, 16)) == 1
    x.mul_(2.0)
    second = fp8.standard(x, weights[0])
    assert calls.count((32, 16)) == 2, "the input changed in place"
    torch.testing.assert_close(second, 2.0 * first[0])


def test_frozen_weights_keep_no_input():
    x = torch.randn(32, 16, device=DEVICE, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        fp8.standard(x, torch.randn(48, 16, device=DEVICE)).sum().backward()
    assert torch.float8_e4m3fn not in saved
    assert x.grad is not None


def test_compiles_without_graph_breaks():
    x = torch.randn(20, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(32, 16, device=DEVICE, requires_grad=True)

    def gradients(function):
        return torch.autograd.grad(function(x, weight).square().sum(), (x, weight))

    compiled = torch.compile(fp8.standard, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(fp8.standard))


def test_zeros_and_no_rows():
    weight = torch.randn(32, 16, device=DEVICE)
    assert fp8.standard(torch.zeros(4, 16, device=DEVICE), weight).count_nonzero() == 0
    assert fp8.standard(torch.zeros(0, 16, device=DEVICE), weight).shape == (0, 32)


@pytest.mark.parametrize("size", [1e-30, 1e-37])
def test_tiny_values_are_not_nan(size):
    x = (torch.randn(4, 16, device=DEVICE) * size).requires_grad_()
    with torch.no_grad():
        x[0, :5] = 0
    weight = torch.randn(32, 16, device=DEVICE, requires_grad=True)
    out = fp8.standard(x, weight)
    torch.testing.assert_close(out / size, x @ weight.t() / size, rtol=0.1, atol=1.0)
    out.backward(torch.full_like(out, size))
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_infinite_input_is_not_hidden():
    x = torch.ones(16, 16, device=DEVICE)
    x[3, 2] = float("inf")
    assert not fp8.standard(x, torch.randn(32, 16, device=DEVICE)).isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "outputs"), [(45, 37), (48, 37), (45, 48)])
def test_other_sizes_are_those_of_tensors_padded_with_zeros(width, outputs, bias):
    x = torch.randn(2, 21, width, device=DEVICE, requires_grad=True)
    linear = nn.Linear(width, outputs, bias=bias).to(DEVICE)
    out = fp8.standard(x, linear.weight, linear.bias)
    padded = nn.Linear(48, 48, bias=bias).to(DEVICE)
    with torch.no_grad():
        for parameter, values in zip(padded.parameters(), linear.parameters(), strict=True):
            parameter.zero_()[tuple(map(slice, values.shape))] = values
    wide = nn.functional.pad(x.detach(), (0, 48 - width)).requires_grad_()
    expected = fp8.standard(wide, padded.weight, padded.bias)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected[..., :outputs], rtol=0, atol=0)
    dout = torch.randn_like(out)
    out.backward(dout)
    expected[..., :outputs].backward(dout)
    torch.testing.assert_close(x.grad, wide.grad[..., :width], rtol=0, atol=0)
    for parameter, wanted in zip(linear.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad[tuple(map(slice, parameter.shape))], rtol=0, atol=0)


def test_preset_binds_unaligned_layers():
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 20)).to(DEVICE)
    opslot.bind(model, "fp8")
    rows = {row.variant: row.kernel for row in opslot.explain(model) if row.op == "linear"}
    assert rows == {"unaligned": "fp8", "standard": "fp8"}


def test_older_gpus_are_unsupported():
    spec = KERNEL_REGISTRY.get("linear", "standard", "fp8")
    ampere = DeviceFacts("gpu", (8, 0))
    assert "requires compute capability 8.9" in spec.unsupported(KernelRequest("linear", "standard", ampere))
    assert spec.unsupported(KernelRequest("linear", "standard", DeviceFacts("gpu", (9, 0)))) is None


def test_auto_cannot_select_a_kernel_with_a_relative_error():
    with pytest.raises(ConfigError, match="None for a kernel with a relative_error"):
        KernelSpec("rough", "linear", "standard", "a:b", relative_error=0.1, priority=10)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 16), (21, 48), (1000, 176), (4096, 4096), (77, 12288)])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_rounds_like_torch(shape, gradient, dtype):
    x = torch.randn(shape, device="cuda", dtype=dtype)
    rows, columns, scale = fp8._quantize(x, gradient, True, True)
    wanted_rows, wanted_columns, wanted_scale = fp8._quantize(x.cpu(), gradient, True, True)
    torch.testing.assert_close(scale.cpu(), wanted_scale)
    difference = (rows.cpu().float() - wanted_rows.float()).ne(0).float().mean()
    assert difference < 1e-3, "only ties may round differently"
    assert torch.equal(columns.float()[:, : len(x)], rows.float().t())
    assert columns[:, len(x) :].float().count_nonzero() == 0
    assert columns.shape == wanted_columns.shape
