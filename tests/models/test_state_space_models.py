"""Models with Mamba-2 mixers: checks, decoding, kernels of other packages, FLOPs, and recurrences without slots."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import opslot
from opslot.verify import check_architecture
from opslot.verify.random_model import packed_batches, random_ids, random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config


@pytest.mark.quick("nemotron_h", "mamba2")
@pytest.mark.parametrize("arch", ["bamba", "nemotron_h", "mamba2"])
def test_eager_auto_and_packed(arch):
    found = check_architecture(arch, checks=("eager", "auto", "packed"))
    assert [(outcome.name, outcome.result) for outcome in found.outcomes] == [
        ("eager", "passed"),
        ("auto", "passed"),
        ("packed", "passed"),
    ], str(found)
    assert "mamba_chunk_scan/standard" in str(found.kernels)


@pytest.mark.parametrize("arch", ["falcon_h1", "granitemoehybrid", "zamba2", "minimax"])
def test_packed_documents_of_other_hybrids(arch):
    found = check_architecture(arch, checks=("packed",))
    assert found["packed"].result == "passed", str(found)


@pytest.mark.parametrize("arch", ["bamba", "mamba2", "minimax"])
def test_eager_separates_packed_documents(arch):
    config = tiny_config(arch)
    model = random_model(config)
    opslot.apply(model, "eager")
    packed, alone = packed_batches(random_ids(config))
    assert worst_difference(train_step(model, packed), train_step(model, alone)) == ""


def test_named_kernels_serve_packed_documents():
    config = tiny_config("bamba")
    model = random_model(config)
    opslot.apply(model, {"causal_conv1d_implementation": "triton", "mamba_chunk_scan_implementation": "triton"})
    packed, alone = packed_batches(random_ids(config))
    assert worst_difference(train_step(model, packed), train_step(model, alone)) == ""


def decoded(model, ids):
    """Logits of a forward on the first tokens, of one that continues from its states, and of a token at a time."""
    with torch.no_grad():
        found = [model(input_ids=ids[:, :10], use_cache=True)]
        for part in (ids[:, 10:15], ids[:, 15:16], ids[:, 16:17]):
            found.append(model(input_ids=part, past_key_values=found[0].past_key_values, use_cache=True))
    return [outputs.logits for outputs in found]


@pytest.mark.parametrize("arch", ["bamba", "minimax"])
def test_decoding_with_a_cache_equals_transformers(arch):
    config = tiny_config(arch)
    model, ids = random_model(config).eval(), random_ids(config)
    expected = decoded(model, ids)
    for ops in ("eager", "auto"):
        opslot.apply(model, ops)
        for got, want in zip(decoded(model, ids), expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("op", ["causal_conv1d", "mamba_chunk_scan"])
def test_bound_kernels_and_documents_replace_the_fused_mixer_of_mamba_ssm(monkeypatch, op):
    """Where mamba_ssm is installed, Transformers calls a function of it that computes the whole mixer in training.

    It mixes packed documents, so it does not run for these either.
    """
    import opslot.generated.bamba as generated

    calls = []

    def fused(*args, **kwargs):
        calls.append(args)

    monkeypatch.setattr(generated, "mamba2_split_conv1d_scan_combined", fused)
    config = tiny_config("bamba")
    model, ids = random_model(config), random_ids(config)
    others = {"causal_conv1d_implementation": "eager", "mamba_chunk_scan_implementation": "eager"}
    opslot.apply(model, others)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert calls
    calls.clear()
    packed, alone = packed_batches(ids)
    assert worst_difference(train_step(model.train(), packed), train_step(model.eval(), alone)) == ""
    assert not calls
    opslot.apply(model.train(), others | {f"{op}_implementation": "auto"})
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert not calls


def test_mixer_compiles_with_fullgraph():
    model = random_model(tiny_config("mamba2"))
    opslot.apply(model, {"causal_conv1d_implementation": "triton", "mamba_chunk_scan_implementation": "triton"})
    mixer = model.backbone.layers[0].mixer
    hidden_states = torch.randn(1, 20, mixer.hidden_size, generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, 7, 20], dtype=torch.int32)
    expected = mixer(hidden_states, cu_seq_lens_q=bounds)
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden_states, cu_seq_lens_q=bounds), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.compile
@pytest.mark.parametrize("arch", ["mamba2", "qwen3_next"])
def test_compiled_layers_take_any_documents_without_compiling_again(arch):
    """The chunks of `torch_chunked` depend on the lengths of documents, so it runs between two graphs."""
    model = random_model(tiny_config(arch))
    opslot.apply(model)
    layer = model.backbone.layers[0].mixer if arch == "mamba2" else model.model.layers[0].linear_attn
    states = torch.randn(1, 20, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, backend=counter)
    frames = []
    for bounds in ([0, 7, 20], [0, 3, 8, 20], [0, 1, 2, 3, 20], [0, 11, 12, 20], [0, 5, 9, 13, 15, 20]):
        documents = torch.tensor(bounds, dtype=torch.int32)
        torch.testing.assert_close(
            compiled(states, cu_seq_lens_q=documents), layer(states, cu_seq_lens_q=documents), rtol=1e-4, atol=1e-5
        )
        frames.append(counter.frame_count)
    assert frames[2] == frames[-1], frames
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch_chunked reads the lengths of packed documents"):
        torch.compile(layer, fullgraph=True, backend="eager")(states, cu_seq_lens_q=documents)


def test_compiled_model_reads_positions_between_two_graphs():
    model = random_model(tiny_config("mamba2"))
    opslot.apply(model)
    states = torch.randn(1, 6, model.config.hidden_size)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass cu_seq_lens_q, or no position_ids"):
        torch.compile(model.backbone, fullgraph=True, backend="eager")(inputs_embeds=states, position_ids=positions)


def test_documents_are_known_by_positions_alone():
    config = tiny_config("minimax")
    model = random_model(config)
    opslot.apply(model)
    packed, alone = packed_batches(random_ids(config))
    packed = [{n: x for n, x in packed[0].items() if not n.startswith(("cu_seq", "max_length"))}]
    assert worst_difference(train_step(model, packed), train_step(model, alone)) == ""
    opslot.restore(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_flops_of_lightning_attention():
    model = random_model(tiny_config("minimax"))
    mixers = [module for module in model.modules() if hasattr(module, "slope_rate")]
    expected = sum(4 * m.num_attention_heads * m.head_dim**2 for m in mixers)
    assert mixers
    assert opslot.count_flops(model, [16]).parts["scan"].forward == 16 * expected


def test_flops_of_the_scan():
    model = random_model(tiny_config("bamba"))
    count = opslot.count_flops(model, [16])
    assert count.uncounted == ()
    mixers = [module for module in model.modules() if hasattr(module, "ssm_state_size")]
    # Update of the state and output: two matmuls per token and head.
    expected = sum(4 * m.num_heads * m.head_dim * m.ssm_state_size for m in mixers)
    assert mixers
    assert count.parts["scan"].forward == 16 * expected
    opslot.apply(model)
    assert opslot.count_flops(model, [16]).parts == count.parts


@pytest.mark.parametrize("arch", ["jamba", "mamba"])
def test_packed_documents_of_mamba_1(arch):
    """The boundaries of documents reach its mixers, which Transformers' layers call without keyword arguments."""
    found = check_architecture(arch, checks=("auto", "packed"))
    assert [found[check].result for check in ("auto", "packed")] == ["passed", "passed"], str(found)
    assert "mamba_chunk_scan/per_channel" in str(found.kernels)
    config = tiny_config(arch)
    model = random_model(config)
    opslot.apply(model, "eager")
    packed, alone = packed_batches(random_ids(config))
    assert worst_difference(train_step(model, packed), train_step(model, alone)) == ""


@pytest.mark.quick("jamba")
@pytest.mark.parametrize("arch", ["mamba", "jamba", "falcon_mamba"])
def test_triton_scan_of_mamba_1(arch):
    """Loss and gradients equal those of torch's code, of packed documents too."""
    config = tiny_config(arch)
    model = random_model(config)
    packed, alone = packed_batches(random_ids(config))
    opslot.apply(model, {"mamba_chunk_scan_implementation": "torch_chunked"})
    expected = train_step(model, alone)
    opslot.apply(model, {"mamba_chunk_scan_implementation": "triton"})
    assert worst_difference(train_step(model, packed), expected) == ""
