"""Which kernels of moe_experts a module gets."""

import pytest
import torch
from torch import nn

from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU, DeviceFacts, facts_of
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.moe_experts import op
from opslot.slots import KernelRequest, OpSlot, bind, explain, unbind
from tests.ops.moe_experts.inputs import KERNELS, inputs, load


class Experts(nn.Module):
    moe_experts = OpSlot("moe_experts", "standard")

    def __init__(self, config, act_fn=None):
        super().__init__()
        self.config = config
        self.act_fn = nn.SiLU() if act_fn is None else act_fn
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
        self.down_proj = nn.Parameter(torch.zeros(2, 4, 4))


class Model(nn.Module):
    def __init__(self, config, act_fn=None):
        super().__init__()
        self.config = config
        self.experts = Experts(config, act_fn)


class Config:
    _experts_implementation = "grouped_mm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("tokens", "width"), [(7, 5), (1, 64), (4, 2049), (3, 0), (0, 8)])
def test_combine_sums_like_torch(dtype, tokens, width):
    from opslot.distributed.expert_parallel import sum_rows as plain
    from opslot.distributed.triton_kernels import sum_rows

    generator = torch.Generator().manual_seed(tokens + width)
    held = torch.randint(0, 4, (tokens,), generator=generator)
    held[-1:] = 2
    count = int(held.sum())
    rows = torch.randn(count, width, generator=generator, dtype=torch.float64).to(dtype)
    order = torch.randperm(count, generator=generator)
    first = held.cumsum(0) - held
    found = sum_rows(rows, order, first)
    token = torch.arange(tokens).repeat_interleave(held)
    expected = torch.zeros(tokens, width, dtype=torch.float64).index_add_(0, token, rows[order].double())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    if width and dtype != torch.bfloat16:  # on CPU torch accumulates bfloat16 bags in another dtype
        torch.testing.assert_close(found, plain(rows, order, first), rtol=tolerance, atol=tolerance)


def test_eager_uses_transformers_loop_for_this_model_only():
    config = Config()
    eager, fused = Model(config), Model(config)
    bind(eager, {"moe_implementation": "eager"})
    bind(fused, {"moe_experts_implementation": "grouped_mm"})
    assert eager.experts.config._experts_implementation == "eager"
    assert fused.experts.config._experts_implementation == config._experts_implementation == "grouped_mm"
    unbind(eager)
    assert eager.experts.config._experts_implementation == "grouped_mm"


def test_auto_never_selects_the_loop():
    model = Model(Config())
    bind(model, "auto")
    assert {row.op: row.chosen for row in explain(model).rows}["moe_experts"] == "grouped_mm"
    other = Model(Config(), act_fn=nn.ELU())
    bind(other, "auto")
    assert {row.op: row.chosen for row in explain(other).rows}["moe_experts"] == "eager"
    assert other.experts.config._experts_implementation == "grouped_mm"


def test_kernels_are_bound_for_other_activations():
    model = Model(Config(), act_fn=nn.GELU("tanh"))
    bind(model, "auto")
    assert explain(model).chosen("moe_experts") == ("grouped_mm",)
    assert (
        KERNEL_REGISTRY.get("moe_experts", "standard", "fused_quack").supports(
            KernelRequest("moe_experts", "standard", facts_of("cpu"), module=model.experts)
        )
        == "supports SiLU, the experts' activation is GELU"
    )


@pytest.mark.parametrize("name", KERNELS)
def test_unknown_activation_raises(name):
    with pytest.raises(KernelError, match="its activation is ELU"):
        load(name)(*inputs(), nn.ELU())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"act_fn": nn.ELU()}, "activation is ELU"),
        ({"is_transposed": True}, r"must be \[E, 2I, H\]"),
        ({"has_bias": True}, "have biases"),
        ({"is_concatenated": False}, "interleaved"),
        ({"has_post_expert_norm": True}, "normalized"),
        ({"gate_up_proj": nn.Parameter(torch.zeros(2, 9, 4)[:, 0])}, "3-D"),
    ],
)
def test_modules_with_other_computation_are_unsupported(change, reason):
    module = Experts(Config())
    assert op.check_standard(module) is None
    for name, value in change.items():
        setattr(module, name, value)
    assert op.check_standard(module) is not None
    with pytest.raises(ConfigError, match=reason):
        bind(module, {"moe_implementation": "grouped_mm"}, device="cpu")


class ClampedExperts(Experts):
    moe_experts = OpSlot("moe_experts", "clamped")
    limit = 7.0


class BiasedExperts(nn.Module):
    moe_experts = OpSlot("moe_experts", "biased")
    limit, alpha, is_concatenated, is_transposed = 7.0, 1.702, False, True

    def __init__(self):
        super().__init__()
        shapes = {"gate_up_proj": (2, 6, 8), "down_proj": (2, 4, 6)}
        for name, shape in {**shapes, "gate_up_proj_bias": (2, 8), "down_proj_bias": (2, 6)}.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("module", "change", "reason"),
    [
        (lambda: ClampedExperts(Config()), {"limit": None}, "has no limit"),
        (lambda: ClampedExperts(Config()), {"has_bias": True}, "have biases"),
        (lambda: ClampedExperts(Config()), {"act_fn": nn.GELU()}, "activation is GELU"),
        (BiasedExperts, {"alpha": None}, "has no alpha"),
        (BiasedExperts, {"is_concatenated": True}, "gate columns come first"),
        (BiasedExperts, {"is_transposed": False}, r"must be \[E, H, 2I\]"),
        (BiasedExperts, {"down_proj_bias": nn.Parameter(torch.zeros(2, 4))}, r"down_proj_bias \(2, 4\)"),
        (BiasedExperts, {"gate_up_proj_bias": None}, "gate_up_proj_bias None"),
    ],
)
def test_modules_of_the_other_variants(module, change, reason):
    module = module()
    bind(module, {"moe_implementation": "grouped_mm"}, device="cpu")
    unbind(module)
    for name, value in change.items():
        setattr(module, name, value)
    with pytest.raises(ConfigError, match=reason):
        bind(module, {"moe_implementation": "grouped_mm"}, device="cpu")


def test_custom_gating_is_unsupported():
    class Clamped(Experts):
        def _apply_gate(self, gate_up):
            return gate_up

    assert "_apply_gate" in op.check_standard(Clamped(Config()))


@pytest.mark.parametrize(
    ("device", "dtype", "variant", "chosen"),
    [
        (CPU, torch.float32, "standard", "grouped_mm"),
        (CPU, torch.float32, "biased", "grouped_mm"),
        (CPU, torch.bfloat16, "clamped", "eager"),
        (DeviceFacts("gpu", (9, 0)), torch.float32, "standard", "grouped_mm"),
        (DeviceFacts("gpu", (8, 0)), torch.bfloat16, "standard", "fused_triton"),
        (DeviceFacts("gpu", (9, 0)), torch.bfloat16, "clamped", "fused_triton"),
        (DeviceFacts("gpu", (9, 0)), torch.bfloat16, "biased", "fused_triton"),
        (DeviceFacts("gpu", (9, 0)), torch.float16, "biased", "eager"),
        (CPU, torch.float32, "split", "grouped_mm"),
        (DeviceFacts("gpu", (9, 0)), torch.bfloat16, "split", "fused_triton"),
        (DeviceFacts("gpu", (9, 0)), torch.float16, "split", "eager"),
        (DeviceFacts("gpu", (7, 5)), torch.float16, "standard", "grouped_mm"),
    ],
)
def test_auto_selects_the_fastest_measured_kernel(device, dtype, variant, chosen):
    pytest.importorskip("triton")
    request = KernelRequest("moe_experts", variant, device, dtype)
    assert KERNEL_REGISTRY.resolve(request).chosen == chosen


def test_quack_without_its_compiler_is_not_selected(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("opslot.slots.spec.has_package", lambda name: name in ("quack", "triton"))
    request = KernelRequest("moe_experts", "standard", DeviceFacts("gpu", (9, 0)), torch.bfloat16)
    assert KERNEL_REGISTRY.resolve(request).chosen == "fused_triton"
    with pytest.raises(ConfigError, match="cutlass"):
        KERNEL_REGISTRY.resolve(request, "fused_quack")


@pytest.mark.parametrize(
    ("version", "folder", "reason"),
    [
        ("0.6.1", "libraries", None),
        ("0.6.2", "lib/python3.12/site-packages/nvidia_cutlass_dsl/dsl_packages", None),
        ("0.6.2", "libraries", "requires CuTe DSL in a site-packages folder with quack-kernels 0.6.2, found "),
    ],
)
def test_quack_requires_an_installed_compiler(tmp_path, monkeypatch, version, folder, reason):
    package = tmp_path / folder / "cutlass"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.setattr("opslot.ops.moe_experts.package_version", lambda name: version)
    request = KernelRequest("moe_experts", "standard", DeviceFacts("gpu", (9, 0)), torch.bfloat16)
    found = KERNEL_REGISTRY.get("moe_experts", "standard", "fused_quack").supports(request)
    assert found == (reason and f"{reason}{package}")


def test_npu_without_npu_raises_with_alternatives():
    request = KernelRequest("moe_experts", "standard", CPU, torch.float32)
    with pytest.raises(ConfigError) as caught:
        KERNEL_REGISTRY.resolve(request, "fused_npu")
    message = str(caught.value)
    assert "moe_implementation='fused_npu'" in message
    assert "requires an NPU" in message
    assert "usable here: eager, grouped_mm" in message
