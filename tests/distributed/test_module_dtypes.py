"""Mixed precision of models whose forward makes tensors in float32: buffers, inputs of encoders, batch norms."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import opslot
from opslot.checkpoint.model_tensors import clean_fqn
from opslot.distributed import gradient_sync, init_parallel_state
from opslot.distributed.module_dtypes import compute_in_dtype, kept_in_float32
from opslot.ops.patch_embed.linear import linear
from opslot.ops.patch_embed.op import can_serve
from opslot.slots import BoundKernel
from opslot.verify.media import media_samples
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config, tiny_configs

# Positions in a buffer; decays in buffers; a batch norm after frames that buffers normalize.
NAMES = ("xglm", "minimax", "granite_speech")


def config_and_batch(name):
    if name != "granite_speech":
        ids = random_ids(tiny_config(name))
        return tiny_config(name), {"input_ids": ids, "labels": ids}
    samples = [(config, media_samples(random_model(config).eval()).batches) for config in tiny_configs(name)]
    return next((config, batches["audio"]) for config, batches in samples if "audio" in batches)


def loss_of(name, mode):
    state = init_parallel_state(device_type="cpu")
    config, batch = config_and_batch(name)
    model = random_model(config).eval()
    opslot.apply(model, "eager")
    opslot.parallelize(model, state, data_parallel_mode=mode, param_dtype=torch.bfloat16)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    return loss.item()


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_computation_of_float32_buffers(ranks, name, mode):
    config, batch = config_and_batch(name)
    exact = random_model(config).eval()(**batch, use_cache=False).loss.item()
    assert ranks.run(loss_of, name, mode) == pytest.approx([exact, exact], rel=0.02)


def calls_of_fused_loss(arch, mode):
    state = init_parallel_state(device_type="cpu")
    config = tiny_config(arch)
    ids = random_ids(config)
    model = random_model(config)
    opslot.apply(model, {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"})
    opslot.parallelize(model, state, data_parallel_mode=mode, param_dtype=torch.bfloat16)
    with opslot.trace() as trace:
        model(input_ids=ids, labels=ids).loss.backward()
    return [kernel for op, kernel in trace.by_op() if op.startswith("cross_entropy_loss")]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
@pytest.mark.parametrize("arch", ["bert", "llava", "qwen3"])
def test_output_layers_keep_their_fused_loss(ranks, arch, mode):
    assert ranks.run(calls_of_fused_loss, arch, mode) == [["chunk_loss"]] * 2


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_keeps_float32_statistics(momentum):
    norms = [torch.nn.BatchNorm1d(4, momentum=momentum) for _ in range(2)]
    compute_in_dtype(norms[0], torch.bfloat16)
    for parameter in norms[0].parameters():
        parameter.data = parameter.data.bfloat16()
    for _ in range(2):
        x = torch.randn(8, 4).bfloat16()
        outputs = [norm(x.to(norm.weight.dtype)) for norm in norms]
        assert outputs[0].dtype == torch.bfloat16
        torch.testing.assert_close(outputs[0], outputs[1].bfloat16())
    for name, buffer in norms[1].named_buffers():
        assert torch.equal(norms[0].get_buffer(name), buffer)


def test_patch_embedding_keeps_its_kernel():
    convolution = nn.Conv2d(3, 4, 2, stride=2).bfloat16()
    model, x = nn.Sequential(convolution), torch.randn(2, 3, 4, 4)
    compute_in_dtype(model, torch.bfloat16)
    assert can_serve(BoundKernel("patch_embed", "standard", "linear", True, linear), convolution)
    torch.testing.assert_close(linear(x, convolution.weight, convolution.bias), model(x))


def test_parametrized_weight_is_computed_once_a_forward():
    plain = nn.Sequential(spectral_norm(nn.Linear(4, 4)))
    plain[0].parametrizations.weight[0]._v.copy_(torch.eye(4)[0])
    cast = copy.deepcopy(plain).bfloat16()
    compute_in_dtype(cast, torch.bfloat16)
    plain.bfloat16()(torch.randn(2, 4).bfloat16())
    assert cast(torch.randn(2, 4)).dtype == torch.bfloat16
    assert torch.equal(plain[0].parametrizations.weight[0]._u, cast[0].parametrizations.weight[0]._u)


def test_inputs_are_cast_in_a_compiled_graph():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).bfloat16()
    compute_in_dtype(model, torch.bfloat16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 4)), model(torch.ones(2, 4)))


class Decayed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.register_buffer("decay", torch.rand(4, 4))

    def forward(self, x):
        x = self.linear(x)
        return (x * self.decay) @ x + torch.matmul(self.decay, x)


def test_matmuls_of_float32_buffers():
    model, x = nn.Sequential(Decayed()), torch.randn(4, 4, dtype=torch.bfloat16)
    y, decay = model[0].linear(x), model[0].decay
    expected = (y * decay).bfloat16() @ y + decay.bfloat16() @ y
    compute_in_dtype(model, torch.bfloat16)
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    with pytest.raises(RuntimeError, match="size"):
        model(x[:3])
    with pytest.raises(RuntimeError, match="dtype"):
        decay @ x


def model_and_ids(dtype):
    """Routers, convolutions and decays stay in float32, some beside other weights of their module or layer."""
    config = tiny_config("bailing_hybrid")
    return random_model(config, dtype, noise=0.02).eval(), random_ids(config)


def step_of(model, ids, scale=1):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss * scale
    loss.backward()
    return loss.detach()


def steps_in_bfloat16(mode):
    state = init_parallel_state(device_type="cpu")
    model, ids = model_and_ids(torch.float32)
    opslot.apply(model, "eager")
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), model_and_ids(torch.bfloat16)[0].parameters(), strict=True):
            parameter.copy_(other)
    opslot.parallelize(model, state, data_parallel_mode=mode, param_dtype=torch.bfloat16)
    found = []
    for sync in (True, False, True):
        with gradient_sync(model, sync):
            found.append(step_of(model, ids, 1 / state.world_size).item())
    names = (clean_fqn(name) for name, _ in model.named_parameters())
    gradients = (p.grad.full_tensor() if mode == "fsdp2" else p.grad for p in model.parameters())
    return found, {name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)}


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_parameters_that_transformers_keeps_in_float32(ranks, mode):
    """Against Transformers' own model in bfloat16."""
    model, ids = model_and_ids(torch.bfloat16)
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert any(name.endswith("conv1d.weight") for name in kept)
    loss = step_of(model, ids).item()
    for losses, gradients in ranks.run(steps_in_bfloat16, mode):
        assert losses == [loss / 2] * 3
        for name, parameter in model.named_parameters():
            # FSDP2 reduces gradients of a layer in one dtype.
            torch.testing.assert_close(
                torch.from_numpy(gradients[name]), 3 * parameter.grad.float(), rtol=2**-7, atol=1e-6, msg=name
            )


def dtypes_of_kept_head():
    state = init_parallel_state(device_type="cpu")
    model = random_model(tiny_config("hy_v4"))
    ids = random_ids(model.config)
    opslot.apply(model, "eager")
    opslot.parallelize(model, state, data_parallel_mode="fsdp2", param_dtype=torch.bfloat16)
    found = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.extend((args[0].dtype, output.dtype)))
    model(input_ids=ids, use_cache=False)
    return found


def test_kept_head_of_its_own_group_gets_float32(ranks):
    assert ranks.run(dtypes_of_kept_head) == [[torch.float32] * 2] * 2


def test_weight_below_an_adapter_stays_in_float32():
    peft = pytest.importorskip("peft")
    model = random_model(tiny_config("t5"))
    before = {module for module, _ in kept_in_float32(model, torch.float16)}
    assert before == {module for path, module in model.named_modules() if path.endswith(".wo")}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["wo"]))
    assert before < {module for module, _ in kept_in_float32(adapted, torch.float16)}
    assert kept_in_float32(model, torch.bfloat16) == set()
