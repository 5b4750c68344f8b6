"""`parallelize(cuda_graphs=True)`: steps with layers as CUDA graphs equal steps without."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils import clip_grad_norm_

import opslot
from opslot._base.errors import ConfigError
from opslot.data.collation import collate, make_sample
from opslot.distributed import get_parallel_state
from opslot.models._cuda_graphs import pad_boundaries, prepare_cuda_graphs
from tests.distributed import tiny

DOCUMENTS = [(5, 11, 8), (24,), (1, 2, 3, 4, 5, 6, 3), (1,) * 24, (12, 12)]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 512}
MODELS = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}


def batch_of(step, device, scale=1):
    """Two samples whose documents differ from step to step, and so does the size of the longest one."""
    generator = torch.Generator().manual_seed(step)

    def sample(lengths):
        documents = [
            torch.randint(1, tiny.COMMON["vocab_size"], (scale * n,), generator=generator).numpy() for n in lengths
        ]
        return make_sample([d.astype("uint32") for d in documents], 24 * scale, 0)

    batch = collate([sample(DOCUMENTS[(step + i) % len(DOCUMENTS)]) for i in range(2)])
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def train(name, device, options, dtype=torch.float32, steps=6, scale=1, evaluated=(), **changes):
    """Losses and gradient norms of steps of three micro batches."""
    model = tiny.build(name, "auto" if device == "cuda" else "eager", 0.05, device, **changes).to(device, dtype)
    opslot.parallelize(model, get_parallel_state(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        if step in evaluated:
            with torch.no_grad():
                found.append(model(**batch_of(100 + step, device, scale)).loss.item())
        loss = 0.0
        for micro_batch in range(3):
            output = model(**batch_of(3 * step + micro_batch, device, scale))
            output.loss.backward()
            loss += output.loss.item()
        found += [loss, clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    torch._dynamo.reset()
    return torch.tensor(found)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}], ids=["same dtype", "copies"])
def test_cuda_graphs_give_the_same_steps(name, options):
    dtype = torch.float32 if options.get("param_dtype") else torch.bfloat16
    run = functools.partial(train, name, "cuda", dtype=dtype, scale=8, evaluated=(0, 3), **WIDE, **MODELS[name])
    expected = run(options)
    counters.clear()
    found = run({"cuda_graphs": True, **options})
    assert not counters["inductor"]["cudagraph_skips"]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)


@pytest.mark.filterwarnings("default")
def test_compiled_layers_take_documents_of_any_number(monkeypatch):
    monkeypatch.setattr("opslot.models.parallelize._check_cuda_graphs", lambda *_: None)
    original = nn.Module.compile
    sizes = set()

    def compile_eagerly(self, mode):
        assert mode == "reduce-overhead"
        original(self, backend="eager")
        compiled = self._compiled_call_impl

        def call(*args, **kwargs):
            sizes.add((len(kwargs["cu_seq_lens_q"]), kwargs["max_length_q"]))
            return compiled(*args, **kwargs)

        self._compiled_call_impl = call

    expected = train("qwen3", "cpu", {})
    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    found = train("qwen3", "cpu", {"cuda_graphs": True})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert sizes == {(16, 24), (32, 24)}


def test_gradients_are_copied_once_a_step():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    prepare_cuda_graphs(layer)
    for _ in range(2):
        layer(x).sum().backward()
        in_graph = layer.weight.grad
        layer(x).sum().backward()
        copy = layer.weight.grad
        assert copy is not in_graph
        assert torch.equal(copy, 2 * in_graph)
        layer(x).sum().backward()
        assert layer.weight.grad is copy
        layer.zero_grad()


def test_padded_boundaries():
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    padded = pad_boundaries(cu_seqlens)
    assert padded.tolist() == [0, 3] + [7] * 14
    assert pad_boundaries(cu_seqlens) is padded
    assert len(pad_boundaries(torch.arange(17, dtype=torch.int32))) == 32
    assert pad_boundaries(torch.arange(32, dtype=torch.int32)).tolist() == list(range(32))


def test_documents_of_a_module_that_runs_once_for_each_raise(monkeypatch):
    monkeypatch.setattr("opslot.models.parallelize._check_cuda_graphs", lambda *_: None)
    monkeypatch.setattr("opslot.models._cuda_graphs.modules_by_document", lambda model: iter([("layers.0", model)]))
    model = opslot.parallelize(tiny.build("qwen3"), cuda_graphs=True)
    with pytest.raises(ConfigError, match="runs once for each document"):
        model(**batch_of(0, "cpu"))


def test_cuda_graphs_on_a_cpu_raise():
    with pytest.raises(ConfigError, match="the model is on cpu"):
        opslot.parallelize(tiny.build("qwen3"), cuda_graphs=True)


@pytest.mark.gpu
def test_cuda_graphs_of_recomputed_layers_raise():
    with pytest.raises(ConfigError, match="computed again in backward"):
        opslot.parallelize(tiny.build("qwen3").to("cuda"), cuda_graphs=True, activation_checkpointing="full")
