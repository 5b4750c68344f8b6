"""Re-binding a parallelized model keeps the parallel wrappers of its kernels."""

import sys

import pytest
import torch

import opslot
from opslot._base.device import DeviceFacts
from opslot._base.errors import ConfigError
from opslot.distributed import ParallelState
from tests.distributed import tiny

FUSED_LOSS = {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"}


def parallelized(name, sizes, ops, options=None):
    from opslot.distributed import init_parallel_state

    state = init_parallel_state(device_type="cpu", **sizes)
    changes = {"output_router_logits": True} if "moe" in name else {}
    return opslot.parallelize(tiny.build(name, ops, **changes), state, **(options or {})), state


def loss_and_gradients(model, state):
    from opslot.distributed import shard_sequence

    rows = tiny.rows(0)
    targets = torch.tensor(int((rows["labels"][:, 1:] != -100).sum()))
    batch = shard_sequence({key: value[state.dp_rank :: state.dp_size] for key, value in rows.items()}, state)
    model.zero_grad()
    loss = model(**batch, use_cache=False, num_items_in_batch=targets).loss
    loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def differences(before, after):
    return [name for name in before if not torch.equal(before[name], after[name])]


def rebound(name, sizes, ops, options=None):
    """The differences after re-binding, after a move to another device, and after both."""
    binding = sys.modules["opslot.slots.binding"]
    model, state = parallelized(name, sizes, ops, options)
    table = str(opslot.explain(model))
    before = loss_and_gradients(model, state)
    opslot.bind(model, ops)
    found = differences(before, loss_and_gradients(model, state))
    real = binding.facts_of
    binding.facts_of = lambda device: DeviceFacts("gpu", (9, 0), "a GPU")
    try:
        opslot.bind(model, {"preset": "eager", "overrides": {}})
    finally:
        binding.facts_of = real
    # The first forward on the CPU re-selects kernels.
    found += differences(loss_and_gradients(model, state), loss_and_gradients(model, state))
    opslot.bind(torch.nn.ModuleDict({"inner": model}), ops)
    found += differences(before, loss_and_gradients(model, state))
    opslot.bind(model, ops)
    return found, table, str(opslot.explain(model))


CASES = [
    ("qwen3", {"sp": 2}, "eager", None, ["Ulysses"]),
    ("qwen3", {"sp": 2}, "auto", {"ulysses_overlap": True}, ["Ulysses", "overlapped projections"]),
    ("qwen3_moe", {"sp": 2}, "auto", None, ["Ulysses", "gathered router logits"]),
    ("qwen3_moe", {"ep": 2}, "eager", None, ["eager + expert parallel"]),
    ("qwen3_moe", {"ep": 2}, "auto", None, ["expert parallel"]),
    ("qwen3_moe", {"ep": 2, "sp": 2}, "auto", None, ["Ulysses", "expert parallel"]),
    ("qwen3", {}, FUSED_LOSS, None, ["chunk_loss + in the head's FSDP group"]),
]


@pytest.mark.quick("*-sizes1-*", "*-sizes5-*", "*-sizes6-*")
@pytest.mark.parametrize(("name", "sizes", "ops", "options", "shown"), CASES)
def test_rebinding_keeps_parallel_wrappers(ranks, name, sizes, ops, options, shown):
    for differing, before, after in ranks.run(rebound, name, sizes, ops, options):
        assert differing == []
        assert before == after
        assert all(text in before for text in shown)


def other_kernels(name, sizes):
    """Loss with kernels selected after parallelizing, and with those selected before."""
    model, state = parallelized(name, sizes, "eager")
    before = loss_and_gradients(model, state)["loss"].item()
    opslot.bind(model, "auto")
    return before, loss_and_gradients(model, state)["loss"].item(), str(opslot.explain(model))


@pytest.mark.parametrize(("name", "sizes"), [("qwen3", {"sp": 2}), ("qwen3_moe", {"ep": 2})])
def test_wrappers_apply_to_newly_selected_kernels(ranks, name, sizes):
    for before, after, table in ranks.run(other_kernels, name, sizes):
        assert after == pytest.approx(before, rel=1e-5)
        assert "sdpa + Ulysses" in table if "sp" in sizes else "grouped_mm + expert parallel" in table


def restored(sizes):
    model, _ = parallelized("qwen3", sizes, "auto")
    opslot.restore(model)


def test_restoring_a_parallelized_model_raises(ranks, rank_failed):
    with pytest.raises(rank_failed, match=r"Qwen3ForCausalLM is parallelized, and .*\n  hint: bind it to eager"):
        ranks.run(restored, {"sp": 2})


def test_parallelizing_an_unbound_model_raises():
    from transformers import Qwen3ForCausalLM

    with pytest.raises(ConfigError, match=r"has no kernels bound, which sp=2 and ep=1 need\n  hint: build it with"):
        opslot.parallelize(Qwen3ForCausalLM(tiny.config_of("qwen3")), ParallelState(sp=2))
