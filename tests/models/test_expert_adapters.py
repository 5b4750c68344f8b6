"""LoRA adapters on stacked experts: a kernel with the adapters added equals PEFT's parametrization."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import opslot
from opslot._base.errors import ConfigError
from opslot.checkpoint.adapters import add_adapter, load_adapter, save_adapter
from opslot.distributed import ParallelState
from opslot.models import build_foundation_model
from opslot.verify.tiny import tiny_config
from tests.models.tiny import with_noise
from tests.omni import CONFIGS


def loss_and_gradients(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.quick("gpt_oss-*", "nemotron_h-grouped_mm", "qwen3_moe-grouped_mm")
@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "nemotron_h"])
def test_equals_the_parametrization_of_peft(arch, kernel):
    torch.manual_seed(0)
    model = with_noise(AutoModelForCausalLM.from_config(tiny_config(arch)))
    names = [f"experts.{'up_proj' if arch == 'nemotron_h' else 'gate_up_proj'}", "experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=names, init_lora_weights=False)
    expected = get_peft_model(model, lora)
    found = copy.deepcopy(expected)
    opslot.apply(found, {"preset": "eager", "moe_implementation": kernel})
    assert "adapters" not in str(opslot.explain(found))
    opslot.parallelize(found)
    assert "adapters" in str(opslot.explain(found))
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    (loss, gradients), (expected_loss, wanted) = (loss_and_gradients(m, ids) for m in (found, expected))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert len(wanted) > 4
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=2e-5)
    with found.disable_adapter(), expected.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.quick("*-grouped_mm", "standard-fused_triton", "split-fused_triton")
@pytest.mark.parametrize("kernel", ["grouped_mm", "fused_triton"])
@pytest.mark.parametrize("variant", ["standard", "split", "clamped", "transposed", "ungated", "biased"])
def test_kernels_equal_added_weights(variant, kernel):
    """Without tokens for an expert, with pairs of another rank, and a rank that is not a multiple of 8."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_()

    experts, hidden, inner, rank = 4, 24, 16, 3
    shapes = [(experts, 2 * inner, hidden), (experts, hidden, inner)]
    if variant == "split":
        shapes = [(experts, inner, hidden)] * 3
    elif variant in ("transposed", "biased"):
        shapes = [(experts, hidden, 2 * inner), (experts, inner, hidden)]
    elif variant == "ungated":
        shapes = [(experts, inner, hidden), (experts, hidden, inner)]
    weights = [(randn(*shape) / 5).detach().requires_grad_() for shape in shapes]
    factors = [(randn(*s) / 5).detach().requires_grad_() for e, a, b in shapes for s in ((e, a, rank), (e, rank, b))]
    x, routing = randn(19, hidden), randn(19, 2)
    index = torch.rand((19, experts), generator=generator).topk(2).indices
    index[index == 1] = experts
    gating = [0.7] if variant == "clamped" else ["silu"]
    biases = [randn(experts, 2 * inner), randn(experts, hidden)] if variant == "biased" else []
    gating = [*biases, 1.5, 1.702] if biases else gating
    run = opslot.KERNEL_REGISTRY.load("moe_experts", variant, kernel)
    found = run.with_adapters(x, *weights, index, routing, *gating, *factors)
    added = [w + a @ b for w, a, b in zip(weights, factors[::2], factors[1::2], strict=True)]
    expected = opslot.KERNEL_REGISTRY.op("moe_experts").variant(variant).reference(x, *added, index, routing, *gating)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    leaves, douts = [x, routing, *factors, *weights, *biases], torch.randn(found.shape, generator=generator)
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, douts) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_no_tensor_of_the_size_of_the_weights_is_made(monkeypatch):
    """Neither a copy of the weights with the adapters nor their gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from opslot.ops._common import custom_op

    # The ops inside the custom op, too.
    monkeypatch.setattr(custom_op, "_modes", lambda: 0)

    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                sizes.append(out.numel())
            return out

    experts, hidden, inner = 64, 32, 32
    weights = [torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)]
    factors = [
        torch.randn(*s, requires_grad=True) for w in weights for s in ((*w.shape[:2], 2), (experts, 2, w.shape[2]))
    ]
    x, index = torch.randn(4, hidden, requires_grad=True), torch.arange(4)[:, None]
    run = opslot.KERNEL_REGISTRY.load("moe_experts", "standard", "grouped_mm")
    known = {w.untyped_storage().data_ptr() for w in weights}
    with Sizes():
        run.with_adapters(x, *weights, index, torch.ones(4, 1), "silu", *factors).sum().backward()
    assert max(sizes) < weights[1].numel() <= weights[0].numel()


def test_single_process_takes_the_device_of_the_parameters():
    """Not that of a state without meshes, whose default is a CPU; on meta, the device that the model was bound for."""
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    opslot.apply(model, "eager")
    opslot.parallelize(model, ParallelState(device=torch.device("cuda:7")))
    assert opslot.explain(model).device.startswith("CPU")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    opslot.apply(model, "eager", device="cpu")
    opslot.parallelize(model, ParallelState(device=torch.device("cuda:7")), load=lambda m: m.to_empty(device="cpu"))
    assert opslot.explain(model).device.startswith("CPU")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kernel", ["grouped_mm", "fused_triton"])
def test_compiled_adapters_on_a_gpu(kernel):
    torch.manual_seed(0)
    config = tiny_config("qwen3_moe")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    names = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=8, target_parameters=names, init_lora_weights=False))
    opslot.apply(model, {"preset": "eager", "moe_implementation": kernel})
    opslot.parallelize(model)
    ids = torch.randint(0, config.vocab_size, (2, 64), device="cuda")
    loss, gradients = loss_and_gradients(model, ids)
    model.zero_grad()
    found = torch.compile(lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, fullgraph=True)(ids)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-2, atol=1e-2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad - gradients[name]).norm() < 0.1 * gradients[name].norm(), name


@pytest.mark.quick("qwen3_moe")
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_compile_has_no_graph_break(arch):
    torch.manual_seed(0)
    config = tiny_config(arch)
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=2, target_parameters=names, init_lora_weights=False))
    opslot.apply(model, {"preset": "eager", "moe_implementation": "grouped_mm"})
    opslot.parallelize(model)
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    loss, gradients = loss_and_gradients(model, ids)
    model.zero_grad()
    compiled = torch.compile(
        lambda ids: model(input_ids=ids, labels=ids, use_cache=False), fullgraph=True, backend="aot_eager"
    )
    found = compiled(ids).loss
    found.backward()
    torch.testing.assert_close(found, loss)
    assert len(gradients) == 2 * 2
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["grouped_mm", "fused_triton"])
def test_opcheck(kernel):
    experts, hidden, inner = 4, 16, 8
    weights = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    factors = [torch.randn(s) for a, b in ((16, 16), (16, 8)) for s in ((experts, a, 8), (experts, 8, b))]
    x, index, routing = torch.randn(6, hidden), torch.randint(0, experts, (6, 2)), torch.rand(6, 2)
    factors = [*factors[:2], None, None, *factors[2:]]
    gating = (None, 1.0, 0.0, "silu", False, True, False, False)
    given = (x, *weights, routing, None, None, None, *factors, index)
    opslot.KERNEL_REGISTRY.load("moe_experts", "standard", kernel)
    op, backward = (getattr(torch.ops.opslot, f"moe_{kernel}_adapters{end}") for end in ("", "_backward"))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.default, (*given, *gating), test_utils=tests)
    _, *parts = op(*given, *gating)
    needs = [True] * 4 + [False] * 3 + [True, True, False, False, True, True]
    arguments = (torch.randn_like(x), *given, *parts, *gating, *needs)
    torch.library.opcheck(backward.default, arguments, test_utils=tests)


def test_adapters_of_an_omni_model_are_read_again(tmp_path):
    """Its adapted weights are named by their path, in which PEFT nests the adapters of a module's second weight."""
    names = ["experts.gate_up_proj", "experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=names, init_lora_weights=False)
    model, again = (build_foundation_model(CONFIGS["qwen3_omni_moe"](), init_device="cpu") for _ in range(2))
    add_adapter(model, lora)
    load_adapter(again, save_adapter(model, tmp_path / "adapters"))
    expected, found = ({name: p for name, p in m.named_parameters() if "lora" in name} for m in (model, again))
    assert found.keys() == expected.keys()
    assert sum("experts" in name for name in found) == 8
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_adapters_whose_own_names_are_renamed(tmp_path):
    """Transformers' renaming of Inkling 2's convolutions adds ".weight", also to the names of adapters."""
    try:
        config = tiny_config("inkling2")
    except ConfigError:
        pytest.skip("Transformers has no Inkling 2")
    model, other = (AutoModelForImageTextToText.from_config(config) for _ in range(2))
    if not any(name.endswith("sconv.weight_proj") for name, _ in model.named_modules()):
        pytest.skip("its convolutions have other names")
    add_adapter(model, LoraConfig(r=2, target_modules=["weight_proj", "q_proj.linear"], init_lora_weights=False))
    save_adapter(model, tmp_path / "adapter")
    load_adapter(other, tmp_path / "adapter")
    adapters = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    for name, tensor in adapters.items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_beside_others_that_the_model_has(tmp_path):
    model, other = (AutoModelForCausalLM.from_config(tiny_config("qwen3")) for _ in range(2))
    add_adapter(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    save_adapter(model, tmp_path / "adapter")
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj", "v_proj"]), other, "other")
    load_adapter(other, tmp_path / "adapter")
    name = "model.layers.0.self_attn.q_proj.lora_B.default.weight"
    assert torch.equal(other.get_parameter(name), model.get_parameter(name))
