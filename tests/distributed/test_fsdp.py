"""What parallelize does to a model, and invalid arguments."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification

import opslot
from opslot._base.errors import ConfigError
from opslot.distributed import (
    ParallelPlan,
    fsdp,
    gradient_sync,
    init_parallel_state,
    shard_model,
    shard_sequence,
)
from opslot.distributed.fsdp_layers import find_layers
from opslot.models.parallelize import parallel_plan
from opslot.verify.tiny import tiny_config
from tests.distributed import tiny
from tests.distributed.tiny import loss_of


def structure(cpu_offload):
    state = init_parallel_state(device_type="cpu", ep=2)
    model = tiny.build(
        "qwen3_moe", {"preset": "eager", "moe_implementation": "grouped_mm", "attn_implementation": "sdpa"}
    )
    before = [(row.slot, row.chosen, row.why, row.modules) for row in opslot.explain(model)]
    opslot.parallelize(model, state, cpu_offload=cpu_offload)
    layer = model.model.layers[1]
    return {
        "same kernels": before == [(row.slot, row.chosen, row.why, row.modules) for row in opslot.explain(model)],
        "slot": repr(layer.mlp.experts._opslot_moe_experts),
        "classes": [type(m).__name__ for m in (model, layer, layer.mlp.experts, layer.mlp.gate, model.lm_head)],
        "experts": layer.mlp.experts.down_proj.placements,
        "experts here": tuple(layer.mlp.experts.down_proj.to_local().shape),
        "dense here": tuple(layer.self_attn.q_proj.weight.to_local().shape),
    }


@pytest.mark.parametrize(
    ("cpu_offload", "experts", "placements"),
    [(False, "Qwen3MoeExperts", (Shard(0),)), (True, "FSDPQwen3MoeExperts", (Shard(1), Shard(0)))],
)
def test_layers_and_experts_that_are_offloaded_are_fsdp_groups_and_keep_slots(ranks, cpu_offload, experts, placements):
    """Experts that only one rank holds need no FSDP."""
    for found in ranks.run(structure, cpu_offload):
        assert found["same kernels"]
        assert found["slot"] == "<expert parallel <moe_experts/standard: grouped_mm>>"
        names = ["FSDPQwen3MoeForCausalLM", "FSDPQwen3MoeDecoderLayer", experts]
        assert found["classes"] == [*names, "Qwen3MoeTopKRouter", "FSDP_Head"]
        assert found["experts"] == placements
        assert found["experts here"] == (2, 32, 16)
        assert found["dense here"] == (16, 32)


def experts_of_one_rank(in_fsdp, options):
    """Losses of two steps with two micro batches each, the last gradients, and all dtypes outside of passes."""
    state = init_parallel_state(device_type="cpu", ep=2)
    model = tiny.build("qwen3_moe")
    with mock.patch("opslot.distributed.fsdp._can_keep_experts", return_value=False) if in_fsdp else nullcontext():
        opslot.parallelize(model, state, **options)
    assert isinstance(model.model.layers[0].mlp.experts, FSDPModule) is in_fsdp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        for is_last in (False, True):
            with gradient_sync(model, is_last):
                loss = loss_of(model, state)
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
    dtypes = {str(x.dtype) for p in model.parameters() for x in (p, p.grad)}
    return losses, tiny.gradients(model), dtypes


@pytest.mark.quick("bfloat16", "full")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="float32"),
        pytest.param({"param_dtype": torch.bfloat16}, id="bfloat16"),
        pytest.param({"param_dtype": torch.bfloat16, "activation_checkpointing": "full"}, id="full"),
        pytest.param({"param_dtype": torch.bfloat16, "compile": True}, id="compile"),
    ],
)
def test_experts_of_one_rank_train_without_fsdp_as_with_it(ranks, options):
    assert ranks.run(experts_of_one_rank, False, options) == ranks.run(experts_of_one_rank, True, options)


FUSED_NORM = {"preset": "eager", "rms_norm_implementation": "triton"}


def fused_norm(recompute):
    """Gradients with fused_add_rms_norm, and the number of its calls."""
    from opslot.ops.rms_norm import triton

    state = init_parallel_state(device_type="cpu")
    model = opslot.parallelize(tiny.build("llama", FUSED_NORM), state)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ran, apply = [], triton._FusedAddRMSNorm.apply
    triton._FusedAddRMSNorm.apply = lambda *args: (ran.append(type(args[2]).__name__), apply(*args))[1]
    try:
        loss_of(model.train(), state).backward()
    finally:
        triton._FusedAddRMSNorm.apply = apply
    return ran, {name: p.grad.full_tensor().tolist() for name, p in model.named_parameters()}


@pytest.mark.quick("True")
@pytest.mark.parametrize("recompute", [False, True])
def test_norm_weight_is_unsharded_in_its_layer(ranks, recompute):
    model = tiny.build("llama", FUSED_NORM)
    loss_of(model, opslot.distributed.ParallelState()).backward()
    for ran, grads in ranks.run(fused_norm, recompute):
        assert ran == ["Parameter"] * (4 if recompute else 2)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.tensor(grads[name]), parameter.grad, rtol=1e-4, atol=1e-5)


NORM_ROTARY = {**FUSED_NORM, "rotary_pos_emb_implementation": "triton"}


def norm_rotary(alone):
    """Gradients with norms and rotation of heads in one kernel, and the types of the weights in its calls.

    Args:
        alone: a norm of heads in the first layer is an FSDP group of its own.
    """
    from opslot.ops.rotary_pos_emb import norm_triton

    state = init_parallel_state(device_type="cpu")
    model = tiny.build("qwen3", NORM_ROTARY)
    if alone:
        fully_shard(model.model.layers[0].self_attn.q_norm, mesh=state.fsdp_mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=state.fsdp_mesh)
    fully_shard(model, mesh=state.fsdp_mesh)
    ran, apply = [], norm_triton._norm_rotary
    norm_triton._norm_rotary = lambda *args: (ran.append([type(x).__name__ for x in args[2:4]]), apply(*args))[1]
    try:
        (loss_of(model.train(), state) * state.dp_size).backward()
    finally:
        norm_triton._norm_rotary = apply
    return ran, {name: p.grad.full_tensor().tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("alone", [False, True])
def test_weights_of_head_norms_are_unsharded_in_attention(ranks, alone):
    model = tiny.build("qwen3", NORM_ROTARY)
    loss_of(model, opslot.distributed.ParallelState()).backward()
    for ran, grads in ranks.run(norm_rotary, alone):
        assert ran == [["Parameter", "Parameter"]] * (1 if alone else 2)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.tensor(grads[name]), parameter.grad, rtol=1e-4, atol=1e-5)


def communication():
    """Reductions during a micro batch in the middle of a step and during the last one."""
    state = init_parallel_state(device_type="cpu", ep=2)
    model = opslot.parallelize(tiny.build("qwen3_moe", "auto"), state)
    counts = []
    for last in (False, True):
        with CommDebugMode() as comm, gradient_sync(model, last):
            loss_of(model, state).backward()
        counts.append({str(op).rpartition(".")[2]: n for op, n in comm.get_comm_counts().items()})
    return counts


def test_gradient_accumulation_reduces_once_per_step(ranks):
    for middle, last in ranks.run(communication):
        reductions = [sum(n for op, n in counts.items() if "reduce_scatter" in op) for counts in (middle, last)]
        # Two layers, the head and the root; experts are not sharded within their ep rank, so they are not reduced.
        assert reductions == [0, 4]


def order_of_reductions(ops):
    """Parameters in the order in which their gradients were reduced, and evaluation logits afterwards."""
    state = init_parallel_state(device_type="cpu")
    model = opslot.parallelize(tiny.build("qwen3", ops), state)
    seen = []
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        parameter = model.get_parameter(name)
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name.split(".")[-2]))
    loss_of(model, state).backward()
    with torch.no_grad():
        logits = model(input_ids=tiny.rows(0)["input_ids"], use_cache=False).logits
    return seen, logits.sum().item(), repr(model.__dict__.get("_opslot_cross_entropy_loss"))


@pytest.mark.parametrize("loss", ["eager", "chunk_loss"])
def test_head_is_reduced_first_and_embeddings_last(ranks, loss):
    ops = {"preset": "eager", "cross_entropy_loss_implementation": loss}
    with torch.no_grad():
        expected = tiny.build("qwen3", ops)(input_ids=tiny.rows(0)["input_ids"]).logits.sum().item()
    for seen, logits, kernel in ranks.run(order_of_reductions, ops):
        assert seen == ["lm_head", "up_proj", "embed_tokens"]
        assert logits == pytest.approx(expected, rel=1e-5)
        assert kernel == ("None" if loss == "eager" else "<in the head <cross_entropy_loss/causal: chunk_loss>>")


def mixed():
    state = init_parallel_state(device_type="cpu")
    model = tiny.build("qwen3")
    seen = {}
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: seen.update(out=out.dtype))
    opslot.parallelize(model, state, param_dtype=torch.bfloat16)
    loss = loss_of(model, state)
    loss.backward()
    torch.distributed.all_reduce(whole := loss.detach().clone())
    return whole.item(), seen["out"], {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}


def test_bfloat16_param_dtype_keeps_float32_parameters(ranks):
    expected = loss_of(tiny.build("qwen3"), opslot.distributed.ParallelState()).item()
    for loss, computed, stored, gradients in ranks.run(mixed):
        assert loss == pytest.approx(expected, rel=2e-2)
        assert loss != pytest.approx(expected, rel=1e-6)
        assert computed is torch.bfloat16
        assert stored == gradients == {torch.float32}


def streamed(folder, sizes):
    from opslot.checkpoint import load_weights

    state = init_parallel_state(device_type="cpu", **sizes)
    model = opslot.build_foundation_model(folder, init_device="meta", ops_implementation="eager")
    reports = []
    opslot.parallelize(model, state, load=lambda m: reports.append(load_weights(m, folder)))
    loss = loss_of(model, state).detach()
    torch.distributed.all_reduce(loss)
    return loss.item(), reports[0].bytes_read


@pytest.mark.parametrize("sizes", [{}, {"ep": 2}])
def test_meta_model_loads_only_local_shards(ranks, tmp_path, sizes):
    model = tiny.build("qwen3_moe")
    model.save_pretrained(tmp_path)
    expected = loss_of(model, opslot.distributed.ParallelState()).item()
    found = ranks.run(streamed, str(tmp_path), sizes)
    assert [loss for loss, _ in found] == [pytest.approx(expected, rel=1e-6)] * 2
    assert sum(size for _, size in found) == pytest.approx(4 * sum(p.numel() for p in model.parameters()), rel=0.02)


class Block(nn.Linear):
    pass


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(4, 4), Block(4, 4))

    def forward(self, x):
        return self.blocks(x)


def any_module():
    state = init_parallel_state(device_type="cpu")
    model = shard_model(Stack(), state, layers=["Block"])
    model(torch.full((1, 4), 1.0 + state.rank)).sum().backward()
    weight = model.blocks[0].weight
    return isinstance(weight, DTensor), weight.grad.full_tensor().tolist()


def test_any_module_is_sharded_by_class_names(ranks):
    model = Stack()
    model(torch.tensor([[1.0] * 4, [2.0] * 4])).sum().backward()
    for sharded, grad in ranks.run(any_module):
        assert sharded
        torch.testing.assert_close(torch.tensor(grad), model.blocks[0].weight.grad)


def call_with_invalid_arguments(case):
    state = init_parallel_state(device_type="cpu", **({"sp": 2} if case == "heads" else {"ep": 2}))
    if case == "layers":
        shard_model(Stack(), state)
    elif case == "meta":
        opslot.parallelize(opslot.build_foundation_model(tiny.config_of("qwen3_moe"), init_device="meta"), state)
    elif case == "experts":
        opslot.parallelize(tiny.build("qwen3"), state)
    elif case == "half a plan":
        names = {"model.layers.*.mlp.experts.gate_up_proj": Shard(0)}
        opslot.parallelize(tiny.build("qwen3_moe"), state, plan=ParallelPlan({"ep": names}))
    elif case == "heads":
        opslot.parallelize(tiny.build("qwen3", num_attention_heads=3, num_key_value_heads=3), state)
    elif case == "checkpointing":
        shard_model(Stack(), state, layers=["Block"], activation_checkpointing=True)
    elif case == "twice":
        opslot.parallelize(opslot.parallelize(tiny.build("qwen3_moe"), state), state)
    elif case == "sharded layers":
        model = tiny.build("qwen3")
        fully_shard(model.model.layers[1], mesh=state.fsdp_mesh)
        opslot.parallelize(model, state)
    elif case == "DDP":
        opslot.parallelize(DistributedDataParallel(tiny.build("qwen3")), state)
    elif case == "tensor parallel":
        model = Stack()
        parallelize_module(model.blocks[1], state.fsdp_mesh, ColwiseParallel())
        shard_model(model, state, layers=["Block"])
    elif case == "dtypes":
        model = Stack()
        model.blocks[1].bias.data = model.blocks[1].bias.data.bfloat16()
        shard_model(model, state, layers=["Block"])


class GradientCheckpointingLayer(nn.Module):
    """Called like Transformers' class."""


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(4, 4)


class Encoder(nn.Module):
    def __init__(self, tied, names):
        super().__init__()
        self.embeddings, self.layers = Embeddings(), nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 4, bias=False)
        self._no_split_modules = names
        if tied:
            self.head.weight = self.embeddings.tokens.weight
        else:
            self.get_input_embeddings = lambda: self.embeddings.tokens


@pytest.mark.parametrize("tied", [True, False], ids=["tied to the head", "called by the model"])
@pytest.mark.parametrize("names", [[], ["Layer", "Embeddings"]], ids=["no names", "names"])
def test_layers_exclude_weights_that_others_use(tied, names):
    model = Encoder(tied, names)
    assert find_layers(model, None) == list(model.layers)


def half_frozen():
    """The gradient in one process of a layer whose frozen weight has another dtype than its bias."""
    state = init_parallel_state(device_type="cpu")
    model = Stack()
    model.blocks[0].bias.requires_grad_(False).data = model.blocks[0].bias.data.bfloat16()
    shard_model(model, state, layers=["Block"], param_dtype=torch.float32)
    model(torch.ones(1, 4)).sum().backward()
    return model.blocks[1].bias.grad.full_tensor().tolist()


def test_frozen_parameters_may_have_another_dtype(ranks):
    assert ranks.run(half_frozen) == [[2.0] * 4] * 2


def xielu(alone):
    """Gradients with a kernel for xIELU, and the types of the alphas in its calls.

    Args:
        alone: each activation is an FSDP group of its own, which unshards the alphas when it is called.
    """
    from opslot.ops.mlp_activation import triton

    state = init_parallel_state(device_type="cpu")
    model = tiny.build("apertus", {"preset": "eager", "mlp_activation_implementation": "triton"}, dtype=torch.float32)
    for layer in model.model.layers:
        if alone:
            fully_shard(layer.mlp.act_fn, mesh=state.fsdp_mesh)
        fully_shard(layer, mesh=state.fsdp_mesh)
    fully_shard(model, mesh=state.fsdp_mesh)
    ran, apply = [], triton._xielu
    triton._xielu = lambda *args: (ran.append([type(x).__name__ for x in args[1:3]]), apply(*args))[1]
    try:
        (loss_of(model.train(), state) * state.dp_size).backward()
    finally:
        triton._xielu = apply
    return ran, {name: p.grad.full_tensor().tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("alone", [False, True])
def test_alphas_of_xielu_are_unsharded_for_its_kernel(ranks, alone):
    model = tiny.build("apertus", "eager", dtype=torch.float32)
    loss_of(model, opslot.distributed.ParallelState()).backward()
    for ran, grads in ranks.run(xielu, alone):
        assert ran == [["Parameter", "Parameter"]] * 2
        assert sum("alpha" in name for name in grads) == 4
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.tensor(grads[name]), parameter.grad, rtol=1e-4, atol=1e-5)


class Routed(nn.Module):
    """A layer in bfloat16 with a router in float32."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.gate = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.up(x) * self.gate(x.float()).to(x.dtype)


def of_two_dtypes(is_sharded):
    torch.manual_seed(0)
    model = nn.Sequential(Routed(), Routed())
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    if is_sharded:
        shard_model(model, init_parallel_state(device_type="cpu"), layers=["Routed"])
    model(x).float().sum().backward()
    return tiny.gradients(model), [str(p.grad.dtype) for p in model.parameters()]


def test_modules_of_another_dtype_are_groups_of_their_own(ranks):
    expected, dtypes = of_two_dtypes(False)
    for found, found_dtypes in ranks.run(of_two_dtypes, True):
        assert found_dtypes == dtypes
        for name, grad in found.items():
            # Both ranks have the same input, and gradients are summed.
            torch.testing.assert_close(torch.tensor(grad), 2 * torch.tensor(expected[name]), rtol=1e-2, atol=1e-2)


def without_checkpointing_layers(model_type, is_sharded):
    """Gradients of a classifier, and the number of FSDP groups."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(tiny_config(model_type)).eval()
    if is_sharded:
        shard_model(model, init_parallel_state(device_type="cpu"), data_parallel_mode="fsdp2")
    ids = torch.randint(3, 20, (1, 8), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([1])).loss.backward()
    return tiny.gradients(model), sum(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize(("model_type", "groups"), [("openai-gpt", 3), ("ctrl", 3), ("albert", 2), ("funnel", 13)])
def test_blocks_in_module_lists_are_sharded_where_transformers_names_no_layers(ranks, model_type, groups):
    """Albert calls its only block once for each layer."""
    expected, _ = without_checkpointing_layers(model_type, False)
    for found, count in ranks.run(without_checkpointing_layers, model_type, True):
        assert count == groups
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            # Both ranks have the same input, and gradients are summed.
            torch.testing.assert_close(torch.tensor(grad), 2 * torch.tensor(expected[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("layers", r"Stack has no layers.*\n.*_no_split_modules is empty.*\n  hint: pass layers="),
        ("meta", r"parameters have no memory, e.g. model.embed_tokens.weight\n  hint: pass load="),
        ("experts", r"ep=2, but qwen3 has no experts"),
        (
            "half a plan",
            r"ep=2, but the parallel plan does not shard model.layers.0.mlp.experts.down_proj\n",
        ),
        ("heads", r"sp=2 does not divide 3 query heads.*\n  hint: use one of 1, 3"),
        ("checkpointing", r"activation_checkpointing needs a Transformers model, not Stack"),
        (
            "twice",
            r"Qwen3MoeForCausalLM is parallelized already\n  found: the model is sharded by FSDP2\n  hint: build it",
        ),
        ("sharded layers", r"Qwen3ForCausalLM is parallelized already\n  found: model.layers.1 is sharded by FSDP2\n"),
        ("DDP", r"is parallelized already\n  found: the model is a DistributedDataParallel\n"),
        ("tensor parallel", r"Stack is parallelized already\n  found: blocks.1.weight is a DTensor\n"),
        (
            "dtypes",
            r"blocks.1 has trainable.*\n  found: blocks.1.weight is float32, blocks.1.bias is bfloat16\n  hint: use",
        ),
    ],
)
def test_invalid_arguments_raise(ranks, rank_failed, case, message):
    with pytest.raises(rank_failed, match=message):
        ranks.run(call_with_invalid_arguments, case)


def test_model_plan_overrides_the_architecture_plan():
    model = tiny.build("qwen3_moe")
    assert set(parallel_plan(model).extra_parallel_plan["ep"]) == {
        f"model.layers.{layer}.mlp.experts.{weight}" for layer in (0, 1) for weight in ("gate_up_proj", "down_proj")
    }
    model.get_parallel_plan = lambda: ParallelPlan({"ep": {"own": Shard(0)}})
    assert parallel_plan(model) == ParallelPlan({"ep": {"own": Shard(0)}})
    assert parallel_plan(tiny.build("qwen3")) is None


def test_small_models_are_not_gathered_again_in_backward(monkeypatch):
    device = torch.device("cuda")
    memory = type("Properties", (), {"total_memory": 10 * 2 * 100})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    model = nn.Linear(10, 10, bias=False)
    assert fsdp._keeps_gathered(model, torch.bfloat16, device)
    assert not fsdp._keeps_gathered(model, None, device)
    assert not fsdp._keeps_gathered(model, torch.bfloat16, torch.device("cpu"))


def test_offload_in_one_process_needs_a_group():
    with pytest.raises(ConfigError, match="group_of_one=True"):
        shard_model(Stack(), layers=["Block"], cpu_offload=True)


def test_mixed_precision_of_a_large_model_in_one_process_needs_a_group(monkeypatch):
    monkeypatch.setattr(fsdp, "can_copy_parameters", lambda parameters, dtype, device: False)
    with pytest.raises(ConfigError, match="group_of_one=True"):
        shard_model(Stack(), layers=["Block"], param_dtype=torch.bfloat16)


def token_values(sizes, ops, changes):
    """Per rank: the largest differences from one process of log-probabilities, entropies and gradients."""
    whole = tiny.rows(0)
    single = tiny.build("qwen3", "eager", **changes)
    if changes.get("attention_bias"):
        single.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 61))
    wanted = single(**whole, use_cache=False, return_log_probs=True, temperature=0.7)
    (wanted.log_probs.sum() + 0.3 * wanted.entropy.sum()).backward()
    gradients = {name: p.grad for name, p in single.named_parameters()}

    state = init_parallel_state(device_type="cpu", **sizes)
    model = tiny.build("qwen3", ops, **changes)
    if changes.get("attention_bias"):
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 61))
    opslot.parallelize(model, state)
    count = torch.tensor(float((whole["labels"][:, 1:] != -100).sum()))
    batch = {name: value[state.dp_rank :: state.dp_size] for name, value in whole.items()}
    out = model(
        **shard_sequence(batch, state),
        use_cache=False,
        return_log_probs=True,
        temperature=0.7,
        num_items_in_batch=count,
    )
    (out.log_probs.sum() + 0.3 * out.entropy.sum()).backward()

    def here(values):
        values = values[state.dp_rank :: state.dp_size]
        length = values.shape[1] // state.sp
        return values[:, state.sp_rank * length : (state.sp_rank + 1) * length]

    def whole_gradient(parameter):
        return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad

    return {
        "log_probs": (out.log_probs - here(wanted.log_probs)).abs().max().item(),
        "entropy": (out.entropy - here(wanted.entropy)).abs().max().item(),
        "gradients": max((whole_gradient(p) - gradients[n]).abs().max().item() for n, p in model.named_parameters()),
        "logits": out.logits,
    }


FUSED_LOSS = {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss", "attn_implementation": "sdpa"}


@pytest.mark.quick("{}-fused-*", "*bias*-fused-sp", "*tie*-eager-fsdp")
@pytest.mark.parametrize("sizes", [{}, {"sp": 2}], ids=["fsdp", "sp"])
@pytest.mark.parametrize(
    "ops", [FUSED_LOSS, {"preset": "eager", "attn_implementation": "sdpa"}], ids=["fused", "eager"]
)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=str)
def test_log_probs_and_their_gradients_equal_one_process(ranks, sizes, ops, changes):
    """The last case has a head with a bias."""
    for found in ranks.run(token_values, sizes, ops, changes):
        assert found["logits"] is None
        assert found["log_probs"] < 1e-5
        assert found["entropy"] < 1e-5
        assert found["gradients"] < 1e-4
