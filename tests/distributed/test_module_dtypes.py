"""Mixed precision of models whose forward makes tensors in float32: buffers, inputs of encoders, batch norms."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import opslot
from opslot.distributed import init_parallel_state
from opslot.distributed.module_dtypes import compute_in_dtype
from opslot.ops.patch_embed.linear import linear
from opslot.ops.patch_embed.op import can_serve
from opslot.slots import BoundKernel
from opslot.verify.media import media_samples
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config, tiny_configs

# Positions in a buffer; a batch norm after frames that buffers normalize.
NAMES = ("xglm", "granite_speech")


def config_and_batch(name):
    if name == "xglm":
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
