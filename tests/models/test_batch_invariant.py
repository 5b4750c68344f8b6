"""`preset: batch_invariant`: a token's log-probability does not depend on what else is in the batch, bit for bit."""

import copy
import pickle

import numpy as np
import pytest
import torch

import opslot
from opslot import OpsImplementationConfig
from opslot._base.errors import ConfigError, KernelError
from tests.models.tiny import tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="the test marked gpu covers it")
ON_GPU = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture
def rows_do_not_depend_on_their_place(monkeypatch):
    """Some BLAS compute rows at the edge of a tile in another order, which tensor cores do not."""

    def matmul(a, b, dtype=None):
        out = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for k in range(a.shape[-1]):
            out += np.multiply(a[..., k, None], b[..., k, None, :], dtype=dtype)
        return out

    monkeypatch.setattr(np, "matmul", matmul)


def model_of(arch, dtype=torch.float32, ops="batch_invariant", **changes):
    model = tiny_model(arch, 0.1, **changes).to(DEVICE, dtype).eval()
    opslot.apply(model, ops)
    return model


def packed(*documents):
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(len(d), device=DEVICE) for d in documents])[None],
        "labels": torch.cat(documents)[None],
    }


@torch.no_grad()
def log_probs(model, **batch):
    return model(**batch, return_log_probs=True, use_cache=False).log_probs


def documents_of(model, *lengths):
    torch.manual_seed(1)
    return [torch.randint(3, model.config.vocab_size, (length,), device=DEVICE) for length in lengths]


def assert_invariant(model, *lengths):
    """The first document alone, repeated as a batch, and packed before, after and between others."""
    one, two, three = documents_of(model, *lengths)
    count = len(one) - 1
    alone = log_probs(model, input_ids=one[None], labels=one[None])[0, :count]
    assert alone.count_nonzero() == count
    batch = torch.stack([one, one.flip(0), one])
    found = {
        "repeated": log_probs(model, input_ids=batch, labels=batch)[2, :count],
        "first": log_probs(model, **packed(one, two, three))[0, :count],
        "between": log_probs(model, **packed(two, one, three))[0, len(two) : len(two) + count],
        "last": log_probs(model, **packed(two, three, one))[0, len(two) + len(three) :][:count],
    }
    assert {name: torch.equal(values, alone) for name, values in found.items()} == dict.fromkeys(found, True)


@ON_CPU
@pytest.mark.parametrize(
    ("arch", "layers", "kv_heads"), [pytest.param("deepseek_v3", 2, 2, marks=pytest.mark.slow), ("qwen3", 1, 1)]
)
def test_log_probs_do_not_depend_on_the_batch(arch, layers, kv_heads, rows_do_not_depend_on_their_place):
    heads = {"num_attention_heads": 2, "num_key_value_heads": kv_heads}
    assert_invariant(model_of(arch, num_hidden_layers=layers, **heads), 9, 70, 5)


DEEPSEEK = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 384,
    "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "qk_head_dim": 192, "v_head_dim": 128,
    "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip


def gpu(*values):
    return pytest.param(*values, marks=ON_GPU)


@pytest.mark.skipif(DEVICE != "cuda", reason="requires a GPU")
@pytest.mark.parametrize(("arch", "changes"), [gpu("deepseek_v3", DEEPSEEK), gpu("qwen3_moe", {}), gpu("qwen3", {})])
@pytest.mark.parametrize("lengths", [(300, 1500, 77), (1, 129, 4000), (513, 2, 1)], ids=str)
def test_log_probs_do_not_depend_on_the_batch_on_a_gpu(arch, changes, lengths):
    model = model_of(arch, torch.bfloat16, **changes)
    one = max(lengths[0], 2), *lengths[1:]
    assert_invariant(model, *one)


@pytest.mark.skipif(DEVICE != "cuda", reason="requires a GPU")
@pytest.mark.parametrize("arch", [gpu("deepseek_v3")])
def test_default_kernels_depend_on_the_batch_on_a_gpu(arch):
    """So that the test above can fail."""
    model = model_of(arch, torch.bfloat16, "auto", **DEEPSEEK)
    with pytest.raises(AssertionError):
        assert_invariant(model, 300, 1500, 77)


def test_explain_lists_every_linear_layer_and_router():
    model = model_of("deepseek_v3", num_hidden_layers=2)
    rows = [row for row in opslot.explain(model) if row.op == "linear"]
    bound = {path for row in rows for path in row.modules}
    assert {row.kernel for row in rows} == {"batch_invariant"}
    linears = {path for path, m in model.named_modules() if type(m) is torch.nn.Linear}
    routers = {path for path, m in model.named_modules() if type(m).__name__ == "DeepseekV3TopkRouter"}
    assert routers
    assert bound >= linears | routers
    assert all("Embedding" not in row.slot and "Norm" not in row.slot for row in rows)
    assert opslot.explain(model).chosen("moe_experts") == ("fused_triton",)


def test_is_off_by_default_and_undone():
    model = model_of("deepseek_v3", ops="auto", num_hidden_layers=1)
    assert not any(row.op == "linear" for row in opslot.explain(model))
    assert not any("forward" in module.__dict__ for module in model.modules())
    opslot.bind(model, "batch_invariant")
    assert "forward" in model.lm_head.__dict__
    opslot.bind(model, "auto")
    assert not any("forward" in module.__dict__ for module in model.modules())
    opslot.bind(model, "batch_invariant")
    opslot.restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


@ON_CPU
def test_gradients_equal_the_eager_model():
    original = model_of("deepseek_v3", ops="eager", num_hidden_layers=2).train()
    model = copy.deepcopy(original)
    opslot.bind(model, "batch_invariant")
    ids = torch.randint(3, model.config.vocab_size, (2, 12))
    losses = [m(input_ids=ids, labels=ids).loss for m in (original, model)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for (name, want), found in zip(original.named_parameters(), model.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(
                found.grad, want.grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.quick("deepcopy")
@ON_CPU
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_use_their_own_weights(copied):
    model = model_of("qwen3", num_hidden_layers=1)
    ids = documents_of(model, 6)[0][None]
    before = log_probs(model, input_ids=ids, labels=ids)
    twin = copied(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    assert torch.equal(log_probs(twin, input_ids=ids, labels=ids), before)
    assert not torch.equal(log_probs(model, input_ids=ids, labels=ids), before)


@ON_CPU
def test_override_binds_some_layers():
    ops = {"preset": "eager", "overrides": {"*.mlp.*": {"linear_implementation": "batch_invariant"}}}
    model = model_of("qwen3", ops=ops, num_hidden_layers=1)
    bound = {path for path, module in model.named_modules() if "forward" in module.__dict__}
    assert bound == {f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}


@ON_CPU
def test_weight_of_another_dtype_raises():
    model = model_of("qwen3", num_hidden_layers=1)
    model.lm_head.to(torch.bfloat16)
    with pytest.raises(KernelError, match="linear_implementation='batch_invariant' cannot take weight"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_other_loss_kernels_do_not_serve_a_batch_invariant_head():
    ops = {"preset": "batch_invariant", "cross_entropy_loss_implementation": "chunk_loss"}
    model = model_of("qwen3", ops=ops, num_hidden_layers=1)
    ids = torch.ones(1, 3, dtype=torch.long, device=DEVICE)
    with pytest.raises(KernelError, match="bound by linear_implementation"):
        model(input_ids=ids, labels=ids)


def test_preset_on_a_cpu_raises(monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("a GPU has them")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="linear_implementation='batch_invariant': requires a GPU"):
        OpsImplementationConfig(preset="batch_invariant")


@ON_CPU
def test_matmuls_of_a_module_with_its_own_matrix_are_replaced(monkeypatch):
    """A router that is not a linear layer, with `F.linear`, `@` and `matmul`."""
    from opslot.ops.linear import triton

    calls = []
    kernel = triton.linear_into
    monkeypatch.setattr(triton, "linear_into", lambda *args: (calls.append(args[1].shape), kernel(*args)))

    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(5, 8))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight) + x @ self.weight.t() + torch.matmul(x, self.weight.mT)

    model = torch.nn.Sequential(Router(), torch.nn.Linear(5, 3), torch.nn.Embedding(4, 8))
    x = torch.randn(7, 8)
    expected = model[1](model[0](x))
    fields = ("linear_implementation", "linear_head_implementation")
    report = opslot.bind(model, dict.fromkeys(fields, "batch_invariant"))
    assert [(row.slot, row.modules) for row in report] == [("Router", ("0",)), ("Linear", ("1",))]
    torch.testing.assert_close(model[1](model[0](x)), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 4
