"""Models with gated delta nets: eager bit for bit, packed documents, kernels of other packages, compile."""

import itertools
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import opslot
from opslot.slots.protocol import keeps_sequences
from opslot.verify.random_model import packed_batches, random_ids, random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config
from tests.models.sizes import MIXED
from tests.models.sizes import SIZES as COMMON

SIZES = COMMON | MIXED | {"linear_value_head_dim": 16}
ARCHITECTURES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
DOCUMENTS = [7, 1, 12, 20]


def build(architecture, **changes):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[architecture](**SIZES | changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")


def gradients(model, **inputs):
    """The loss and every gradient."""
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def packed(rows):
    """Documents in `rows` rows, as opslot's collate and shard_sequence give them."""
    ids = torch.randint(1, 61, (rows, sum(DOCUMENTS) // rows), generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32)
    labels = ids.flatten().clone()
    labels[bounds[:-1].long()] = -100
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])
    longest = max(DOCUMENTS)
    return {
        "input_ids": ids,
        "labels": labels.view_as(ids),
        "position_ids": positions.view_as(ids),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "num_items_in_batch": torch.tensor(sum(n - 1 for n in DOCUMENTS)),
    }


def each_alone(model, batch):
    """The sums over documents that were given to the model one at a time."""
    total = {}
    for a, b in itertools.pairwise(batch["cu_seq_lens_q"].tolist()):
        document = {name: batch[name].view(1, -1)[:, a:b] for name in ("input_ids", "labels")}
        if b - a > 1:
            for name, x in gradients(model, **document, num_items_in_batch=batch["num_items_in_batch"]).items():
                total[name] = total.get(name, 0) + x
    return total


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        error = (x - expected[name]).abs().max().item()
        assert error < 1e-6, f"{name}: {error}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_eager_is_bit_for_bit_and_auto_is_close(architecture):
    model, ids = build(architecture), torch.randint(1, 61, (2, 70), generator=torch.Generator().manual_seed(1))
    expected = gradients(model, input_ids=ids, labels=ids)
    opslot.apply(model, "eager")
    found = gradients(model, input_ids=ids, labels=ids)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    report = str(opslot.apply(model, "auto"))
    assert "chunk_gated_delta_rule/standard" in report
    assert "causal_conv1d/standard" in report
    assert_close(gradients(model, input_ids=ids, labels=ids), expected)


@pytest.mark.quick("qwen3_next-*", "olmo_hybrid-auto", "qwen3_5_text-eager")
@pytest.mark.parametrize("ops", ["eager", "auto"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_documents_equal_documents_alone(architecture, ops):
    model = build(architecture)
    opslot.apply(model, ops)
    assert keeps_sequences(model) is None
    for rows in (1, 2):
        batch = packed(rows)
        assert_close(gradients(model, **batch), each_alone(model, batch))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "lfm2"])
def test_documents_are_known_by_positions_alone(architecture):
    """As Transformers' attention knows them; also of the model without its head."""
    changes = {"layer_types": ["conv", "full_attention"]} if architecture == "lfm2" else {}
    model = build(architecture, **changes)
    opslot.apply(model, "auto")
    assert keeps_sequences(model) is None
    batch = packed(2)
    batch = {name: batch[name] for name in ("input_ids", "position_ids")}
    cu_seqlens = packed(2)["cu_seq_lens_q"].tolist()
    for part in (model, model.model):
        found = part(**batch, use_cache=False)[0].flatten(0, 1)
        for a, b in itertools.pairwise(cu_seqlens):
            alone = part(input_ids=batch["input_ids"].view(1, -1)[:, a:b], use_cache=False)[0][0]
            torch.testing.assert_close(found[a:b], alone, rtol=0, atol=1e-5)
    opslot.restore(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_padding_does_not_change_the_tokens_after_it():
    model = build("qwen3_next")
    opslot.apply(model, "auto")
    ids = torch.randint(1, 61, (1, 12), generator=torch.Generator().manual_seed(1))
    padded, mask = torch.nn.functional.pad(ids, (3, 0)), torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    positions = (mask.cumsum(1) - 1).clamp(0)
    found = model(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 3:]
    torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_decoding_with_a_cache_equals_one_forward(ops):
    model = build("qwen3_next").eval()
    opslot.apply(model, ops)
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        first = model(input_ids=ids[:, :7], use_cache=True)
        parts = [first.logits]
        for token in (7, 8):
            after = model(input_ids=ids[:, token : token + 1], past_key_values=first.past_key_values, use_cache=True)
            parts.append(after.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


def test_eager_is_torch_code_where_other_packages_are_installed(forks, tmp_path):
    """Transformers selects the functions of fla and causal_conv1d on import."""
    code = """
        import importlib.machinery, sys, types

        def fail(*args, **kwargs):
            raise AssertionError("another package's kernel ran")

        for name in ("causal_conv1d", "fla"):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.causal_conv1d_fn = module.causal_conv1d_update = fail
            module.chunk_gated_delta_rule = module.fused_recurrent_gated_delta_rule = fail
            sys.modules[name] = module
        import torch
        from tests.models.test_linear_attention import build
        import opslot
        model, ids = build("qwen3_next"), torch.ones(1, 5, dtype=torch.long)
        try:
            model(input_ids=ids)
        except AssertionError:
            print("Transformers ran it")
        opslot.apply(model, "eager")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    """
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.append({str(Path(__file__).parents[2])!r})\n{textwrap.dedent(code)}")
    process = forks.start(script)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "Transformers ran it" in out


def test_layer_compiles_with_fullgraph():
    model = build("qwen3_next")
    opslot.apply(model, {"causal_conv1d_implementation": "triton", "chunk_gated_delta_rule_implementation": "triton"})
    layer = model.model.layers[0].linear_attn
    hidden_states = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, 7, 40], dtype=torch.int32)
    expected = layer(hidden_states, cu_seq_lens_q=bounds)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden_states, cu_seq_lens_q=bounds), expected)


@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_packed_documents_of_kimi_delta_attention(ops):
    config = tiny_config("kimi_linear")
    model = random_model(config)
    opslot.apply(model, ops)
    assert "chunk_gated_delta_rule/per_channel" in {f"{row.op}/{row.variant}" for row in opslot.explain(model).rows}
    packed_ids, alone = packed_batches(random_ids(config))
    assert worst_difference(train_step(model, packed_ids), train_step(model, alone)) == ""


@pytest.mark.quick("kimi_linear")
@pytest.mark.parametrize("arch", ["kimi_linear", "bailing_hybrid"])
def test_triton_kernel_of_kimi_delta_attention(arch):
    """Loss and gradients equal those of torch's code, of packed documents too."""
    config = tiny_config(arch)
    model = random_model(config)
    packed_ids, alone = packed_batches(random_ids(config))
    opslot.apply(model, {"chunk_gated_delta_rule_implementation": "torch_chunked"})
    expected = train_step(model, alone)
    opslot.apply(model, {"chunk_gated_delta_rule_implementation": "triton"})
    assert worst_difference(train_step(model, packed_ids), expected) == ""


def test_named_kernels_serve_packed_documents():
    model = build("qwen3_5_text")
    batch = packed(2)
    opslot.apply(model, "eager")
    expected = gradients(model, **batch)
    opslot.apply(model, {"causal_conv1d_implementation": "triton", "chunk_gated_delta_rule_implementation": "triton"})
    assert_close(gradients(model, **batch), expected)


def test_seq_idx_separates_documents_without_cu_seq_lens():
    model = build("qwen3_next")
    opslot.apply(model, "auto")
    batch = packed(2)
    expected = gradients(model, **batch)
    lengths = batch.pop("cu_seq_lens_q").diff()
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths).view_as(batch["input_ids"]).to(torch.int32)
    del batch["cu_seq_lens_k"], batch["max_length_q"], batch["max_length_k"]
    assert_close(gradients(model, **batch, seq_idx=index), expected)


@pytest.mark.parametrize("arch", ["olmo_hybrid", "kimi_linear"])
def test_output_of_convolution_is_not_sliced_without_a_cache(arch):
    """Its backward would write the gradient into another tensor, with other strides."""
    model = random_model(tiny_config(arch), torch.float32)
    opslot.apply(model, "auto")
    sizes = []
    slice_backward = torch.ops.aten.slice_backward.default

    class Slices(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is slice_backward:
                sizes.append(tuple(args[1]))
            return function(*args, **(kwargs or {}))

    ids = random_ids(model.config, 24)
    with Slices():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    # The loss slices nothing of three dimensions whose last one is the sequence.
    assert not [size for size in sizes if len(size) == 3 and size[2] == 24]
