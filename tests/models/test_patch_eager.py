"""Generated classes without bound kernels equal Transformers' classes bit for bit."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import re
from typing import Any

import pytest
import torch

from opslot.patchgen.engine import generate
from opslot.patchgen.materialization import find_patch
from opslot.patchgen.source import installed_release
from tests.models.sizes import SIZES as COMMON

ARCHS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "seed_oss": "SeedOss", "qwen3_moe": "Qwen3Moe"}
SLOTS = {
    "llama": {"rms_norm": 7, "swiglu_mlp": 2, "rotary_pos_emb": 2, "cross_entropy_loss": 1},
    "qwen2": {"rms_norm": 7, "swiglu_mlp": 2, "rotary_pos_emb": 2, "cross_entropy_loss": 1},
    "qwen3": {"rms_norm": 11, "swiglu_mlp": 2, "rotary_pos_emb": 4, "cross_entropy_loss": 1},
    "seed_oss": {"rms_norm": 7, "swiglu_mlp": 2, "rotary_pos_emb": 2, "cross_entropy_loss": 1},
    "qwen3_moe": {
        "rms_norm": 11,
        "moe_experts": 2,
        "rotary_pos_emb": 4,
        "cross_entropy_loss": 1,
        "load_balancing_loss": 1,
    },
}
# The others have the slots of Qwen3 but that of norms of heads, as test_generated_slots_equal_qwen3 checks.
COMPARED = ["qwen3", "qwen3_moe"]
HEADS = ["ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
TINY = {
    **COMMON,
    "vocab_size": 67,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


def pair(arch: str, head: str = "ForCausalLM", **options: Any) -> tuple[Any, Any]:
    """Transformers' model and the generated one with the same weights."""
    upstream = importlib.import_module(f"transformers.models.{arch}.modeling_{arch}")
    generated = importlib.import_module(f"opslot.generated.{arch}")
    settings = {**TINY, **(MOE if arch == "qwen3_moe" else {}), **options}
    make_config = getattr(upstream, f"{ARCHS[arch]}Config")
    torch.manual_seed(0)
    reference = getattr(upstream, ARCHS[arch] + head)(make_config(**settings))
    ours = getattr(generated, ARCHS[arch] + head)(make_config(**settings))
    ours.load_state_dict(reference.state_dict(), strict=True)
    return reference, ours


def batch(head: str = "ForCausalLM") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 67, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 8:], mask[1, 8:] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if head == "ForCausalLM":
        return {**inputs, "labels": ids.masked_fill(mask == 0, -100)}
    if head == "ForSequenceClassification":
        return {**inputs, "labels": torch.tensor([0, 2, 1])}
    if head == "ForTokenClassification":
        return {**inputs, "labels": ids % 3}
    return {**inputs, "start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 5, 6])}


def outputs_and_gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    output = model(**inputs)
    output.loss.backward()
    result = {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
    result |= {f"{name}.{i}": v for name in ("router_logits",) for i, v in enumerate(output.get(name) or ())}
    result |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return result


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


@pytest.mark.quick("qwen3_moe-*", "llama-ForCausalLM", "qwen2-ForCausalLM")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("arch", ARCHS)
def test_loss_logits_and_gradients_equal_transformers(arch, head):
    options = {"num_labels": 3} if head in ("ForSequenceClassification", "ForTokenClassification") else {}
    reference, ours = pair(arch, head, **options)
    expected = outputs_and_gradients(reference, batch(head))
    assert "loss" in expected
    assert len(expected) > 15
    assert_same(outputs_and_gradients(ours, batch(head)), expected)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in COMPARED])
def test_generated_slots_equal_qwen3(arch):
    """Compares the generated text up to class names and the options of attention: some have no sliding window."""

    def lines_with_slots(arch):
        text = generate(find_patch(arch), installed_release())
        text = re.sub(r"\b(Llama|Qwen2|Qwen3|SeedOss)([A-Z])", r"\2", text)
        # Qwen3 alone has norms of heads, whose edits come before others.
        text = text.replace('"rotary_pos_emb_norm": ("rotary_pos_emb", "norm_full"), ', "")
        text = re.sub(r"Patch\.\d+", "Patch", text)
        lines = [line.strip() for line in text.splitlines() if "_opslot" in line and "_options" not in line]
        return sorted(line for line in lines if "_opslot_rotary_pos_emb_norm" not in line)

    assert lines_with_slots(arch) == lines_with_slots("qwen3")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_module_is_generated_and_declares_its_slots(arch):
    reference, ours = pair(arch)
    counted: dict[str, int] = {}
    for module in ours.modules():
        assert not type(module).__module__.startswith(f"transformers.models.{arch}")
        for suffix, (op, _) in getattr(type(module), "_opslot_slots", {}).items():
            counted[op] = counted.get(op, 0) + 1
            assert getattr(module, f"_opslot_{suffix}") is None
    assert counted == SLOTS[arch]
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in reference.named_parameters()]


@pytest.mark.parametrize("head", HEADS[1:])
def test_other_heads_use_the_generated_backbone(head):
    reference, ours = pair("llama", head)
    assert type(ours.base_model).__module__ == "opslot.generated.llama"
    assert ours.base_model_prefix == reference.base_model_prefix


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [{"logits_to_keep": 4}, {"output_hidden_states": True, "output_attentions": True}, {"return_dict": False}],
)
def test_call_options(arch, options):
    reference, ours = pair(arch, attn_implementation="eager", output_router_logits=False)
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    with torch.no_grad():
        expected, found = reference(**inputs, **options), ours(**inputs, **options)
    assert len(expected) == len(found)
    torch.testing.assert_close(_flat(found), _flat(expected), rtol=0, atol=0)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if hasattr(value, "values") else value
    return [leaf for item in items if isinstance(item, torch.Tensor | tuple) for leaf in _flat(item)]


def test_router_logits_are_captured():
    _, ours = pair("qwen3_moe")
    output = ours(**batch())
    assert [logits.shape for logits in output.router_logits] == [(33, 4)] * 2
    assert output.aux_loss.item() > 0


def test_router_logits_are_captured_without_init(forks, tmp_path):
    """In a process that never built the class: an instance moved to it, and one unpickled from elsewhere."""
    _, ours = pair("qwen3_moe")
    expected = ours(**batch()).loss.item()
    torch.save(pair("qwen3_moe")[1], tmp_path / "model.pt")
    torch.save(pair("qwen3_moe")[0], tmp_path / "upstream.pt")
    torch.save(batch(), tmp_path / "batch.pt")
    script = tmp_path / "script.py"
    script.write_text(f"""
import torch
import opslot.generated.qwen3_moe as generated
batch = torch.load("{tmp_path}/batch.pt")
unpickled = torch.load("{tmp_path}/model.pt", weights_only=False)
moved = torch.load("{tmp_path}/upstream.pt", weights_only=False)
for module in moved.modules():
    if type(module).__module__.startswith("transformers.models.qwen3_moe"):
        module.__class__ = getattr(generated, type(module).__name__)
print(*(model(**batch).loss.item() for model in (unpickled, moved)))
""")
    out, err = forks.start(script).communicate()
    assert [float(loss) for loss in out.split()] == [expected] * 2, err


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_implementation_of_transformers_is_used(implementation):
    reference, ours = pair("qwen3_moe")
    assert ours._can_set_experts_implementation()
    assert ours._can_set_attn_implementation()
    for model in (reference, ours):
        model.set_experts_implementation(implementation)
    assert_same(outputs_and_gradients(ours, batch()), outputs_and_gradients(reference, batch()))


def test_bound_experts_take_precedence_over_the_dispatcher():
    _, ours = pair("qwen3_moe")
    seen = []

    def kernel(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, activation):
        seen.append((hidden_states.shape, gate_up_proj.shape, down_proj.shape, top_k_index.shape, top_k_weights.shape))
        return torch.zeros_like(hidden_states)

    ours.model.layers[0].mlp.experts._opslot_moe_experts = kernel
    ours(**batch())
    assert seen == [((33, 32), (4, 24, 32), (4, 32, 12), (33, 2), (33, 2))]


class FusedLoss:
    """Computes the loss from hidden states and the head's weight, as a fused kernel does."""

    def __init__(self, serves: bool = True) -> None:
        self.serves = serves
        self.calls: list[dict[str, Any]] = []

    def can_serve(self, model: Any, head: Any) -> bool:
        return self.serves

    def __call__(self, hidden_states, weight, labels, **kwargs):
        self.calls.append(kwargs)
        logits = hidden_states @ weight.T
        if logits.ndim == 3:
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits.float(), labels)


@pytest.mark.parametrize("arch", COMPARED)
def test_fused_causal_loss_skips_the_logits(arch):
    reference, ours = pair(arch, output_router_logits=False)
    reference.eval(), ours.eval()
    ours._opslot_cross_entropy_loss = kernel = FusedLoss()
    expected, found = reference(**batch()), ours(**batch())
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    assert len(kernel.calls) == 1
    without_labels = {name: value for name, value in batch().items() if name != "labels"}
    assert torch.equal(ours(**without_labels).logits, reference(**without_labels).logits)
    assert len(kernel.calls) == 1


def test_fused_causal_loss_gets_the_arguments_of_the_caller():
    _, ours = pair("qwen3")
    ours._opslot_cross_entropy_loss = kernel = FusedLoss()
    ours(**batch(), num_items_in_batch=7)
    assert kernel.calls[0]["num_items_in_batch"] == 7


def test_unsupported_head_keeps_the_transformers_loss():
    reference, ours = pair("qwen3")
    ours._opslot_cross_entropy_loss = kernel = FusedLoss(serves=False)
    assert_same(outputs_and_gradients(ours, batch()), outputs_and_gradients(reference, batch()))
    assert kernel.calls == []


def test_fused_classification_loss():
    reference, ours = pair("qwen3", "ForSequenceClassification", num_labels=3)
    ours._opslot_cross_entropy_loss = kernel = FusedLoss()
    expected, found = reference(**batch("ForSequenceClassification")), ours(**batch("ForSequenceClassification"))
    torch.testing.assert_close(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    assert len(kernel.calls) == 1


@pytest.mark.parametrize(
    ("num_labels", "labels"),
    [(1, torch.tensor([0.5, 1.0, 2.0])), (3, torch.ones(3, 3))],
    ids=["regression", "multi-label"],
)
def test_other_classification_problems_keep_the_transformers_loss(num_labels, labels):
    reference, ours = pair("llama", "ForSequenceClassification", num_labels=num_labels)
    ours._opslot_cross_entropy_loss = kernel = FusedLoss()
    inputs = {**batch("ForSequenceClassification"), "labels": labels}
    assert torch.equal(ours(**inputs).loss, reference(**inputs).loss)
    assert kernel.calls == []


@pytest.mark.quick("qwen3_moe")
@pytest.mark.parametrize("arch", COMPARED)
def test_full_graph_compile(arch):
    reference, ours = pair(arch)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    inputs = batch()
    # Transformers installs the hooks that capture router logits on the first call, under a lock that cannot be traced.
    ours(**inputs)
    expected = outputs_and_gradients(reference, inputs)
    found = outputs_and_gradients(compiled, inputs)
    assert_same({name.replace("_orig_mod.", ""): value for name, value in found.items()}, expected)


@pytest.mark.parametrize("arch", COMPARED)
def test_copies_compute_the_same(arch):
    reference, ours = pair(arch)
    expected = outputs_and_gradients(reference, batch())
    ours.zero_grad()
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(saved, weights_only=False)]
    for copied in copies:
        assert type(copied) is type(ours)
        assert_same(outputs_and_gradients(copied, batch()), expected)


@pytest.mark.parametrize("arch", COMPARED)
def test_gradient_checkpointing(arch):
    reference, ours = pair(arch)
    for model in (reference, ours):
        model.train()
        model.gradient_checkpointing_enable()
    assert_same(outputs_and_gradients(ours, batch()), outputs_and_gradients(reference, batch()))
