"""Attention without a slot: explain names what runs, `eager` is applied, and the user's selection is kept."""

import copy
import sys

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoConfig

import opslot
from opslot import KERNEL_REGISTRY
from opslot._base.device import DeviceFacts
from opslot._base.errors import ConfigError
from opslot.ops.attention.forms import find_attention, find_own_attention
from opslot.ops.attention.mask_forms import find_masks_of_one_implementation
from opslot.ops.attention.masks import _warn_of_weights
from opslot.patchgen.forms import ClassFact, ModuleView
from opslot.patchgen.upstream import UpstreamModule
from opslot.slots import KernelRequest
from opslot.slots.protocol import COMPUTES_ATTENTION, MASKS_OF
from opslot.verify.random_model import class_of, random_ids, random_model, whole_batch
from opslot.verify.tiny import tiny_config
from tests.models.sizes import SIZES


def config_of(name="qwen3"):
    return AutoConfig.for_model(name, **SIZES)


def attention(report):
    return [(row.chosen, row.runs) for row in report if row.op == "attention"]


@pytest.fixture
def own_attention():
    """A user's implementation registered with Transformers; yields the list of its calls."""
    calls = []

    def attend(module, query, key, value, mask, **kwargs):
        calls.append(module)
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("own_attention", attend)
    transformers.AttentionMaskInterface.register("own_attention", transformers.masking_utils.sdpa_mask)
    return calls


def run(model):
    ids = torch.arange(1, 13).view(2, 6)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def test_auto_keeps_attention_selected_by_the_user(own_attention):
    model = transformers.Qwen3ForCausalLM._from_config(config_of(), attn_implementation="own_attention")
    report = opslot.apply(model)
    assert attention(report) == [("eager", "own_attention")]
    assert "eager (Transformers' own_attention)" in str(report)
    assert "built with Transformers' 'own_attention', which auto keeps" in str(report)
    run(model)
    assert len(own_attention) == 2
    # A named kernel overrides it, and auto restores the user's selection.
    assert attention(opslot.bind(model, {"attn_implementation": "sdpa"})) == [("sdpa", "")]
    run(model)
    assert len(own_attention) == 2
    assert attention(opslot.bind(model)) == [("eager", "own_attention")]
    opslot.restore(model)
    assert model.config._attn_implementation == "own_attention"


def test_attention_selected_after_binding_is_kept(own_attention):
    model = opslot.build_foundation_model(config_of())
    model.set_attn_implementation("own_attention")
    opslot.bind(model)
    run(model)
    assert len(own_attention) == 2
    opslot.restore(model)
    assert model.config._attn_implementation == "own_attention"


@pytest.mark.parametrize("default", ["sdpa", "eager"])
def test_auto_replaces_default_attention(default):
    model = transformers.Qwen3ForCausalLM._from_config(config_of(), attn_implementation=default)
    assert attention(opslot.apply(model)) == [("sdpa", "")]
    opslot.restore(model)
    assert model.config._attn_implementation == default


@pytest.mark.parametrize("is_applied_first", [False, True])
def test_copied_layer_runs_the_attention_of_its_model(is_applied_first):
    model = transformers.Qwen3ForCausalLM(config_of()).eval()
    if is_applied_first:
        opslot.apply(model)
    # Its config is a copy of the model's.
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.config.num_hidden_layers = 3
    model.config.layer_types = ["full_attention"] * 3
    ids = torch.arange(1, 13).view(2, 6)
    inputs = {"input_ids": ids, "attention_mask": (ids != 12).long(), "use_cache": False}
    opslot.restore(model)
    expected = model(**inputs).logits
    opslot.apply(model)
    assert len({module.self_attn.config._attn_implementation for module in model.model.layers}) == 1
    torch.testing.assert_close(model(**inputs).logits[:, :5], expected[:, :5])
    opslot.restore(model)
    assert {module.self_attn.config._attn_implementation for module in model.model.layers} == {"sdpa"}


@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_config_with_output_attentions_keeps_eager(name, tmp_path):
    config = tiny_config(name)
    config._attn_implementation = "eager"
    config.output_attentions = True
    model, ids = random_model(config), random_ids(config)
    expected = model(input_ids=ids).attentions
    report = opslot.apply(model)
    assert ("eager", "eager") in attention(report)
    assert "output_attentions=True" in str(report)
    found = model(input_ids=ids).attentions
    assert len(found) == config.num_hidden_layers
    torch.testing.assert_close(found, expected)
    model.save_pretrained(tmp_path)


def test_output_attentions_with_a_kernel_is_logged(caplog):
    model = transformers.Qwen3ForCausalLM._from_config(config_of())
    opslot.apply(model, {"attn_implementation": "sdpa"})
    _warn_of_weights.cache_clear()
    assert not model(input_ids=torch.arange(1, 7)[None], output_attentions=True).attentions
    assert caplog.text.count("does not return the weights of attention") == 1


def test_auto_without_a_usable_kernel_keeps_sdpa():
    """On a CPU no kernel has dropout, and Transformers' sdpa is what the model would have run."""
    config = config_of()
    config.attention_dropout = 0.1
    model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    assert attention(opslot.apply(model, device="cpu")) == [("eager", "sdpa")]
    assert attention(opslot.bind(model, {"attn_implementation": "eager"}, device="cpu")) == [("eager", "eager")]
    assert attention(opslot.bind(model, device="cpu")) == [("eager", "sdpa")]


@pytest.fixture
def skipped_attention(monkeypatch):
    """Qwen-3 as if discovery had skipped its attention."""
    from opslot.generated import qwen3

    part = ("attention", "Qwen3Attention", "is not causal")
    monkeypatch.setattr(qwen3.Qwen3PreTrainedModel, "_opslot_skipped", (part,), raising=False)


@pytest.mark.usefixtures("skipped_attention")
def test_explain_names_the_attention_that_runs():
    model = opslot.build_foundation_model(config_of())
    assert attention(opslot.explain(model)) == [("eager", "sdpa")]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("skipped_attention")
def test_eager_is_applied_without_a_slot():
    model = opslot.build_foundation_model(config_of(), ops_implementation={"attn_implementation": "eager"})
    assert attention(opslot.explain(model)) == [("eager", "eager")]
    assert model.config._attn_implementation == "eager"
    opslot.restore(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("skipped_attention")
def test_named_attention_without_a_slot_raises():
    with pytest.raises(ConfigError, match="model: attn_implementation='sdpa': is not causal; use eager or auto"):
        opslot.build_foundation_model(config_of(), ops_implementation={"attn_implementation": "sdpa"})


def test_named_loss_without_a_slot_raises():
    config = AutoConfig.for_model("chameleon", **SIZES, vocabulary_map={"<image>": 8})
    with pytest.raises(
        ConfigError,
        match=r"cross_entropy_loss_implementation='chunk_loss': ChameleonForConditionalGeneration.* has no slot",
    ):
        opslot.build_foundation_model(config, ops_implementation={"cross_entropy_loss_implementation": "chunk_loss"})
    report = opslot.explain(opslot.build_foundation_model(config, init_device="meta"))
    assert [row.symbol.split(".")[0] for row in report.skipped if row.op.startswith("cross_entropy")] == [
        "ChameleonForConditionalGeneration"
    ]


def test_sub_models_get_their_own_attention():
    """The vision tower of Qwen4-Exp gets a kernel, its language model keeps what Transformers runs."""
    model = random_model(tiny_config("qwen4_exp"))
    report = opslot.apply(model, "auto", device="cpu")
    text, tower = type(model.model.language_model).__name__, type(model.model.visual).__name__
    rows = {row.slot: (row.chosen, row.runs) for row in report if row.op == "attention"}
    assert rows == {text: ("eager", "sdpa"), tower: ("sdpa", "")}
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation.startswith("opslot_sdpa")
    # A kernel can be named for one of them.
    named = opslot.bind(model, {"overrides": {"model.visual": {"attn_implementation": "sdpa"}}}, device="cpu")
    assert {row.slot: row.chosen for row in named if row.op == "attention"} == {text: "eager", tower: "sdpa"}


def test_attention_that_reads_no_implementation_keeps_its_masks():
    """Gemma 4's audio tower reads a dense mask in code of its own, whatever kernel the other parts have."""
    model = random_model(tiny_config("gemma4"))
    tower = model.model.audio_tower
    before = tower.config._attn_implementation
    report = opslot.apply(model, {"attn_implementation": "sdpa"}, device="cpu")
    assert type(tower).__name__ not in {row.slot for row in report if row.op == "attention"}
    assert tower.config._attn_implementation == before
    assert model.config.get_text_config()._attn_implementation.startswith("opslot_sdpa")


def test_pixtral_passes_cu_seqlens_instead_of_a_mask_of_all_images(monkeypatch):
    """The mask would have the square of the patches of all images, and attention would compute all of it."""
    config = transformers.PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        patch_size=4,
        image_size=32,
    )
    torch.manual_seed(0)
    model = transformers.PixtralVisionModel._from_config(config, attn_implementation="eager")
    images = torch.randn(3, 3, 24, 32)
    sizes = [(24, 32), (8, 16), (4, 4)]

    def outcome():
        model.zero_grad()
        out = model(images, image_sizes=sizes).last_hidden_state
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = outcome()
    opslot.apply(model, {"preset": "eager", "attn_implementation": "sdpa"})
    if opslot.explain(model).chosen("attention") != ("sdpa",):
        pytest.skip("this release of Transformers has no branch with cu_seqlens")
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "generate_block_attention_mask", None)
    for found, want in zip(outcome(), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    opslot.restore(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("glob", ["model.*", "model.layers.*.self_attn", "*"])
def test_override_of_all_attention_of_a_model(glob):
    model = transformers.Qwen3ForCausalLM._from_config(config_of())
    report = opslot.apply(model, {"overrides": {glob: {"attn_implementation": "eager"}}})
    assert attention(report) == [("eager", "eager")]


def test_override_of_one_submodel():
    model = random_model(tiny_config("qwen3_vl"))
    report = opslot.apply(model, {"overrides": {"model.visual.*": {"attn_implementation": "eager"}}})
    found = {row.variant: row.chosen for row in report if row.op == "attention"}
    assert found == {"bidirectional": "eager", "causal": "sdpa"}


@pytest.mark.parametrize("value", ["eager", "sdpa"])
def test_override_of_a_part_of_the_attention_raises(value):
    model = transformers.Qwen3ForCausalLM._from_config(config_of())
    with pytest.raises(ConfigError, match=r"share its masks, and the glob matches 1 of 2; use '\*'"):
        opslot.apply(model, {"overrides": {"model.layers.0.*": {"attn_implementation": value}}})


def test_named_override_without_a_match_raises():
    model = transformers.Qwen3ForCausalLM._from_config(config_of())
    wanted = {"model.layers.7.*": {"rms_norm_implementation": "torch_fused"}}
    with pytest.raises(ConfigError, match=r"no module path like this has the op; model.layers.0.* has it"):
        opslot.apply(model, {"overrides": wanted})
    wanted = {"model.layers.7.*": {"attn_implementation": "sdpa"}}
    with pytest.raises(ConfigError, match="no module path like this has the op; model has it"):
        opslot.apply(model, {"overrides": wanted})


@pytest.mark.parametrize(("arch", "field"), [("bert", "attention_probs_dropout_prob"), ("gpt2", "attn_pdrop")])
def test_dropout_of_any_name_is_known(arch, field):
    config = tiny_config(arch)
    setattr(config, field, 0.1)
    model = random_model(config)
    with pytest.raises(ConfigError, match=r"has no dropout, this model's attention_dropout is 0\.1"):
        opslot.apply(model, {"preset": "eager", "attn_implementation": "triton"}, device="cpu")
    opslot.apply(model, "auto", device="cpu")
    model(**whole_batch(random_ids(config))).loss.backward()


INDEXER = """
class ToyIndexer(nn.Module):
    def forward(self, scores, attention_mask):
        {add}
        return scores.topk(2).indices


class ToyAttention(nn.Module):
    def forward(self, query, attention_mask, **kwargs):
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        return attention_interface(self, query, query, query, attention_mask, indices=self.indexer(query), **kwargs)
"""
ADD_ANY = "if attention_mask is not None:\n            scores = scores + attention_mask"
ADD_FLOATS = "scores = scores.masked_fill(~attention_mask, float('-inf'))"


@pytest.mark.parametrize(("add", "found"), [(ADD_ANY, True), (ADD_FLOATS, False)], ids=["any mask", "bools"])
def test_indexers_that_add_any_mask_are_found(add, found):
    """In Transformers 5.9 GLM's does, which gets none with sdpa, so that its attention sees later tokens."""
    module = ModuleView(UpstreamModule("toy", "5.9.0", INDEXER.replace("{add}", add)))
    facts = [(fact.name, fact.attribute, fact.value) for fact in find_masks_of_one_implementation(module)]
    assert facts == ([("ToyAttention", MASKS_OF, "eager")] if found else [])
    (skip,) = find_attention(module)
    assert ("it would see later tokens" in skip.reason) == found


OWN_MASK = """
class ToyAttention(nn.Module):
    def forward(self, query, attention_mask, **kwargs):
        mask = self.own_mask(query, attention_mask=attention_mask)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        return attention_interface(self, query, query, query, attention_mask=mask, **kwargs)

    def own_mask(self, query, attention_mask):
        if attention_mask is not None:
            query = query + attention_mask
        return query


class ToyModel(nn.Module):
    def forward(self, x):
        return create_causal_mask(inputs_embeds=x{always})
"""


@pytest.mark.parametrize(("always", "found"), [("", True), (", allow_is_causal_skip=False", False)])
def test_own_masks_that_are_added_to_a_causal_one_are_found(always, found):
    """Doge's up to Transformers 5.17, which gets no mask with sdpa."""
    module = ModuleView(UpstreamModule("toy", "5.9.0", OWN_MASK.replace("{always}", always)))
    facts = [(fact.name, fact.value) for fact in find_masks_of_one_implementation(module)]
    assert facts == ([("ToyAttention", "eager")] if found else [])


def test_windows_that_a_config_has_for_single_layers():
    """Reading such an attribute of the whole config raises."""
    pytest.importorskip("transformers.models.neomme")
    model = random_model(tiny_config("neomme"))
    report = opslot.apply(model, {"preset": "eager", "attn_implementation": "sdpa"})
    assert {chosen for chosen, _ in attention(report)} == {"sdpa"}


def test_attention_without_the_interface_that_reads_bools_is_skipped():
    """In Transformers 5.9 and 5.17, Gemma 4's of audio, which reads masks of eager attention the wrong way."""
    text = """
class ToyAudioAttention(nn.Module):
    def forward(self, scores, attention_mask=None):
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask.logical_not(), -1e9)
        return scores.softmax(-1)
"""
    fact, skip = find_masks_of_one_implementation(ModuleView(UpstreamModule("toy", "5.9.0", text)))
    assert (fact.name, fact.attribute, fact.value) == ("ToyAudioAttention", MASKS_OF, "sdpa")
    assert (skip.symbol, skip.op) == ("ToyAudioAttention", "attention")


@pytest.mark.parametrize(("needed", "ops"), [("eager", "auto"), ("sdpa", {"attn_implementation": "eager"})])
def test_attention_that_reads_masks_of_one_implementation_runs_it(monkeypatch, needed, ops):
    model = random_model(tiny_config("deepseek_v32"))
    opslot.apply(model, ops)
    assert model.config._attn_implementation != needed
    monkeypatch.setattr(type(model.model.layers[0].self_attn), MASKS_OF, needed, raising=False)
    opslot.bind(model, ops)
    assert model.config._attn_implementation == needed
    opslot.bind(model, "eager")
    assert model.config._attn_implementation == "sdpa"
    opslot.restore(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("ops", "runs"), [("eager", "eager"), ("auto", "sdpa")])
def test_masks_made_with_another_config_fit_the_attention_that_runs(ops, runs):
    """BLT makes the masks of its parts with its own config, and each part has another one."""
    config = tiny_config("blt")
    original, model = (random_model(config).eval() for _ in range(2))
    original.set_attn_implementation(runs)
    opslot.apply(model, {"preset": "eager", "attn_implementation": ops})
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {runs}
    batch = {"input_ids": random_ids(config), "labels": random_ids(config), "use_cache": False}
    assert torch.equal(model(**batch).loss, original(**batch).loss)


@pytest.mark.parametrize("name", ["bloom", "falcon", "mpt"])
def test_attention_without_the_interface_is_explained(name):
    model = random_model(tiny_config(name))
    report = opslot.apply(model, "auto", device="cpu")
    assert attention(report) == []
    (part,) = [row for row in report.skipped if row.op == "attention"]
    assert part.reason == "computes attention itself, without Transformers' attention interface"
    assert all("atten" in type(model.get_submodule(path)).__name__.lower() for path in part.modules)
    assert part.reason in str(report)
    with pytest.raises(ConfigError, match=r"attn_implementation='sdpa': \w+Attention has no slot: computes attention"):
        opslot.bind(model, {"attn_implementation": "sdpa"}, device="cpu")


def test_classes_that_compute_attention_themselves_leave_others_their_kernel():
    """AIMv2's pooling, beside layers that call the interface and use the same config."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**sizes, image_size=16, patch_size=4))
    report = opslot.apply(model, "auto", device="cpu")
    assert attention(report) == [("sdpa", "")]
    assert [(row.symbol, row.op) for row in report.skipped] == [("Aimv2AttentionPoolingHead", "attention")]


@pytest.mark.parametrize(
    ("code", "computes"),
    [
        ("weights = nn.Softmax(dim=-1)(torch.matmul(q, k))\n        return torch.matmul(weights, v)", True),
        ("weights = (q @ k).softmax(-1)\n        return weights @ v", True),
        ("return F.scaled_dot_product_attention(q, k, v)", True),
        ("return torch.softmax(torch.matmul(q, k), -1)", False),
        ("return ALL_ATTENTION_FUNCTIONS['sdpa'](torch.matmul(q, k), torch.matmul(k, v).softmax(-1))", False),
    ],
)
def test_attention_of_a_class_is_recognized_by_its_calls(code, computes):
    text = f"class ToyAttention(nn.Module):\n    def forward(self, q, k, v):\n        {code}\n"
    found = list(find_own_attention(ModuleView(UpstreamModule("toy", "5.9.0", text))))
    assert [finding.attribute for finding in found if isinstance(finding, ClassFact)] == [COMPUTES_ATTENTION] * computes
    assert len(found) == 2 * computes


@pytest.mark.quick("gemma4_text", "deepseek_v3")
@pytest.mark.parametrize("arch", ["gemma4_text", "gemma2", "deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_next"])
def test_auto_on_an_h200_serves_the_head_sizes_of_default_configs(arch, monkeypatch):
    """Among the kernels that this machine can import, and never one that raises or makes a dense mask."""
    pytest.importorskip("triton")
    h200 = DeviceFacts("gpu", (9, 0), "NVIDIA H200")
    monkeypatch.setattr("opslot.slots.binding.facts_of", lambda device: h200)
    config = AutoConfig.for_model(arch)
    with torch.device("meta"):
        model = class_of(config)._from_config(config, dtype=torch.bfloat16)
    report = opslot.apply(model, "auto")
    fused = {"triton", "cudnn", "flash_attention_4", "flash_attention_4_or_triton", "cudnn_or_triton"}
    assert {row.chosen for row in report if row.op == "attention"} <= fused


@pytest.mark.parametrize(
    ("arch", "window", "width", "fastest"),
    [
        ("gpt_oss", 128, 64, "flash_attention_4_or_triton"),
        ("gpt_oss", 4096, 64, "flash_attention_4"),
        ("mistral", 256, 64, "flash_attention_4_or_triton"),
        ("mistral", None, 128, "flash_attention_4"),
        ("mistral", None, 144, "triton"),
        ("mistral", None, 160, "cudnn_or_triton"),
        ("gemma3_text", 1024, 256, "cudnn_or_triton"),
        ("gemma2", 1024, 256, "triton"),
    ],
)
def test_kernel_of_a_window_and_head_size_on_an_h200(arch, window, width, fastest):
    config = AutoConfig.for_model(arch, sliding_window=window, num_hidden_layers=2, head_dim=width)
    with torch.device("meta"):
        model = class_of(config)._from_config(config, dtype=torch.bfloat16)
    opslot.apply(model, "auto")
    h200 = DeviceFacts("gpu", (9, 0), "NVIDIA H200")
    given = KernelRequest("attention", "causal", h200, torch.bfloat16, model.model, model.model.config)
    specs = [spec for spec in KERNEL_REGISTRY.specs("attention") if spec.variant == "causal"]
    specs = [spec for spec in specs if spec.supports is None or spec.supports(given) is None]
    values = {spec.name: found.value for spec in specs if (found := spec.priority_for(given)) is not None}
    assert max(values, key=values.get) == fastest
