"""Full models compared with Transformers' classes with the same weights."""

import copy
import io
import json
import pickle

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import opslot
from opslot._base.errors import ConfigError
from opslot.models._config_values import check_values
from opslot.verify.tiny import tiny_config
from tests.models.plain import PREFIX, config_of, original

ARCHES = ("llama", "qwen2", "qwen3", "seed_oss", "qwen3_moe")


def ours(arch, reference, ops, head="ForCausalLM"):
    model = opslot.build_foundation_model(config_of(arch), ops_implementation=ops, architecture=PREFIX[arch] + head)
    model.load_state_dict(reference.state_dict())
    return model


def run(model, seed=1, **extra):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 97, (2, 17), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -100, ids)
    model.zero_grad()
    out = model(input_ids=ids, labels=labels, **extra)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("arch", ARCHES)
def test_all_eager_equals_transformers_bit_for_bit(arch):
    reference = original(arch, implementation=None)
    model = ours(arch, reference, "eager")
    (a, ga), (b, gb) = run(reference), run(model)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.logits, b.logits)
    assert_same(ga, gb)
    if arch == "qwen3_moe":
        assert torch.equal(a.aux_loss, b.aux_loss)


def test_language_model_of_a_multimodal_checkpoint(tmp_path):
    whole = transformers.AutoModelForImageTextToText.from_config(tiny_config("qwen3_5")).eval()
    whole.save_pretrained(tmp_path)
    model = opslot.build_foundation_model(
        tmp_path, tmp_path, architecture="Qwen3_5ForCausalLM", ops_implementation="eager"
    )
    assert type(model.config) is type(whole.config.text_config)
    ids = torch.arange(5, 15)[None]
    assert torch.equal(model.eval()(ids).logits, whole(ids).logits)


@pytest.mark.parametrize("arch", ARCHES)
def test_auto_is_as_accurate_as_eager(arch):
    reference = original(arch)
    fp64, true_grads = run(copy.deepcopy(reference).double())
    eager, eager_grads = run(reference)
    # `auto` selects eager for a small vocabulary, but this test needs the fused loss.
    model = ours(arch, reference, {"cross_entropy_loss_implementation": "chunk_loss"})
    out, grads = run(model)
    assert out.logits is None
    assert opslot.explain(model).chosen("rms_norm") != ("eager",)

    def error(found, true):
        return (found.double() - true).abs().max().item()

    assert error(out.loss, fp64.loss) <= 2 * error(eager.loss, fp64.loss) + 2e-6
    worst = max(error(eager_grads[n], g) for n, g in true_grads.items())
    for name, true in true_grads.items():
        assert error(grads[name], true) <= 2 * worst + 1e-7, name


@pytest.mark.quick("eager-qwen3_moe", "auto-llama", "auto-qwen3_moe")
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_sequence_classification(arch, ops):
    config = config_of(arch, num_labels=5)
    reference = original(arch, config, "ForSequenceClassification")
    model = opslot.build_foundation_model(
        config, ops_implementation=ops, architecture=f"{PREFIX[arch]}ForSequenceClassification"
    )
    model.load_state_dict(reference.state_dict())
    ids = torch.randint(1, 97, (3, 9), generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([4, 0, 2])
    a, b = reference(input_ids=ids, labels=labels), model(input_ids=ids, labels=labels)
    torch.testing.assert_close(a.loss, b.loss, rtol=0 if ops == "eager" else 1e-5, atol=0 if ops == "eager" else 1e-6)
    a.loss.backward()
    b.loss.backward()
    for (name, p), (_, q) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0 if ops == "eager" else 1e-5, msg=name)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("ops", ["eager", {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"}])
def test_token_classification(arch, ops):
    """Its head has a bias."""
    reference = original(arch, config_of(arch, num_labels=5), "ForTokenClassification").eval()
    model = copy.deepcopy(reference)
    opslot.apply(model, ops)
    ids = torch.randint(1, 97, (3, 9), generator=torch.Generator().manual_seed(3))
    labels = (ids % 5).masked_fill(ids % 7 == 0, -100)
    a, b = reference(input_ids=ids, labels=labels), model(input_ids=ids, labels=labels)
    tolerance = {"rtol": 0, "atol": 0} if ops == "eager" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(a.loss, b.loss, **tolerance)
    assert torch.equal(a.logits, b.logits)
    assert (model._opslot_cross_entropy_loss is None) == (ops == "eager")
    a.loss.backward()
    b.loss.backward()
    for (name, p), (_, q) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **tolerance, msg=name)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_loads_weights_from_a_folder(arch, tmp_path):
    reference = original(arch, implementation=None)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    model = opslot.build_foundation_model(tmp_path, tmp_path, ops_implementation="eager")
    assert_same(run(reference)[1], run(model)[1])


def test_classifier_loads_a_language_model_checkpoint(tmp_path):
    original("qwen3").save_pretrained(tmp_path)
    model = opslot.build_foundation_model(
        tmp_path, tmp_path, architecture="Qwen3ForSequenceClassification", config_kwargs={"num_labels": 3}
    )
    assert model.score.weight.shape == (3, 32)
    assert 0 < model.score.weight.std() < 0.1
    assert torch.equal(model.model.norm.weight, torch.ones(32))


@pytest.mark.parametrize("first", ["eager", "auto"])
def test_two_models_with_different_kernels(first):
    second = "auto" if first == "eager" else "eager"
    config = config_of("qwen3_moe")
    models = {ops: opslot.build_foundation_model(config, ops_implementation=ops) for ops in (first, second)}
    models["auto"].load_state_dict(models["eager"].state_dict())
    assert opslot.explain(models["eager"]).chosen("rms_norm") == ("eager",)
    assert models["eager"].config._attn_implementation == "sdpa"
    assert models["auto"].config._attn_implementation.startswith("opslot_")
    reference = original("qwen3_moe", implementation=None)
    reference.load_state_dict(models["eager"].state_dict())
    assert_same(run(reference)[1], run(models["eager"])[1])
    assert not torch.equal(run(models["auto"])[1]["lm_head.weight"], run(models["eager"])[1]["lm_head.weight"])


@pytest.mark.parametrize("arch", ARCHES)
def test_apply_and_restore_on_an_existing_model(arch):
    model = original(arch)
    before, grads = run(model)
    storage = {n: p.data_ptr() for n, p in model.named_parameters()}
    report = opslot.apply(model, "auto")
    assert opslot.explain(model) is report
    assert type(model).__module__ == f"opslot.generated.{arch}"
    after, _ = run(model)
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-5, atol=1e-6)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == storage
    opslot.restore(model)
    assert type(model) is getattr(transformers, f"{PREFIX[arch]}ForCausalLM")
    again, again_grads = run(model)
    assert torch.equal(again.loss, before.loss)
    assert_same(again_grads, grads)


def test_apply_does_not_change_another_model_of_the_same_config():
    config = config_of("qwen3")
    cls = transformers.Qwen3ForCausalLM
    one, two = cls(config), cls(config)
    assert one.config is two.config
    was = two.config._attn_implementation
    opslot.apply(one)
    assert two.config._attn_implementation == was
    assert type(two) is cls


def test_apply_is_all_or_nothing():
    model = original("qwen3")
    with pytest.raises(ConfigError, match="requires an NPU"):
        opslot.apply(model, {"rms_norm_implementation": "npu"})
    assert type(model) is transformers.Qwen3ForCausalLM
    assert type(model.model.norm).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", 0), ("num_key_value_heads", 0), ("num_attention_heads", -1)]
)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_invalid_sizes_are_named(tmp_path, arch, field, value):
    config_of(arch).save_pretrained(tmp_path)
    for source in (config_of(arch), tmp_path):
        with pytest.raises(ConfigError, match=rf"(.*\n)+  found: {field}={value}\n  hint: ") as caught:
            opslot.build_foundation_model(source, config_kwargs={field: value})
        assert isinstance(caught.value.__cause__, ZeroDivisionError | RuntimeError)


def test_invalid_config_value_is_named():
    with pytest.raises(ConfigError, match="num_attention_heads='four' is not a valid value for a qwen3 config"):
        opslot.build_foundation_model(config_of("qwen3"), config_kwargs={"num_attention_heads": "four"})


def test_all_invalid_values_are_named_in_nested_configs_too():
    from opslot.verify.tiny import tiny_config

    config = tiny_config("qwen2_5_vl")
    config.text_config.rms_norm_eps, config.vision_config.hidden_act = float("nan"), "foo"
    with pytest.raises(ConfigError) as caught:
        opslot.build_foundation_model(config)
    assert "text_config.rms_norm_eps=nan" in str(caught.value)
    assert "vision_config.hidden_act='foo'" in str(caught.value)


@pytest.mark.parametrize("arch", ["gemma3", "musicgen", "modernbert", "mistral4", "smollm3", "qwen2_vl", "reformer"])
def test_default_configs_are_valid(arch):
    check_values(transformers.CONFIG_MAPPING[arch](), arch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_default_configs_of_all_architectures_are_valid():
    for arch in transformers.CONFIG_MAPPING:
        try:
            config = transformers.CONFIG_MAPPING[arch]()
        except Exception:
            # Some need an argument.
            continue
        check_values(config, arch)


def test_unknown_class_in_architectures_is_logged(tmp_path, caplog):
    config_of("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["Foo"]}))
    assert type(opslot.build_foundation_model(tmp_path)).__name__ == "Qwen3ForCausalLM"
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "names the class Foo in architectures" in record.getMessage()


def chosen_now(model, op):
    (row,) = [row for row in opslot.explain(model) if row.op == op]
    return row.chosen, row.why


def test_explain_shows_attention_set_after_binding():
    model = opslot.build_foundation_model(config_of("qwen3"), ops_implementation={"attn_implementation": "sdpa"})
    bound = opslot.explain(model)
    model.set_attn_implementation("eager")
    now = ("eager", "the model was set to Transformers' 'eager' after opslot bound sdpa")
    assert chosen_now(model, "attention") == now
    assert chosen_now(torch.nn.Sequential(model), "attention") == chosen_now(copy.deepcopy(model), "attention") == now
    model.set_attn_implementation("sdpa")
    replaced, why = chosen_now(model, "attention")
    assert replaced == "replaced"
    assert "Transformers' 'sdpa'" in why
    assert len(opslot.explain(model)) == len(bound)
    assert opslot.bind(model, {"attn_implementation": "sdpa"}) is opslot.explain(model)
    assert chosen_now(model, "attention") == ("sdpa", "named by attn_implementation")


def test_explain_shows_attention_of_each_model():
    pair = torch.nn.ModuleList(opslot.build_foundation_model(config_of("qwen3")) for _ in range(2))
    opslot.bind(pair, {"attn_implementation": "sdpa"})
    pair[1].set_attn_implementation("eager")
    found = {row.chosen: row.modules for row in opslot.explain(pair) if row.op == "attention"}
    assert found == {"sdpa": ("0",), "eager": ("1",)}


def test_explain_shows_experts_set_after_binding():
    model = opslot.build_foundation_model(config_of("qwen3_moe"), ops_implementation={"moe_implementation": "eager"})
    model.set_experts_implementation("grouped_mm")
    replaced, why = chosen_now(model, "moe_experts")
    assert replaced == "replaced"
    assert why == "the model was set to Transformers' 'grouped_mm' after opslot bound eager"
    opslot.bind(model, {"moe_implementation": "grouped_mm"})
    model.set_experts_implementation("batched_mm")
    # opslot's kernel takes precedence over Transformers' experts dispatcher.
    assert chosen_now(model, "moe_experts") == ("grouped_mm", "named by moe_implementation")


def test_apply_to_a_module_without_slots_raises():
    with pytest.raises(ConfigError, match="found nothing to bind in Linear"):
        opslot.apply(torch.nn.Linear(2, 2))


def test_models_log_with_the_verbosity_of_transformers(caplog):
    model = AutoModelForCausalLM.from_config(tiny_config("falcon")).train()
    model.gradient_checkpointing_enable()
    opslot.apply(model, "eager")
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=True)
    finally:
        transformers.utils.logging.set_verbosity(before)
    assert "use_cache=True" not in caplog.text


def test_build_of_a_model_without_slots_raises():
    with pytest.raises(ConfigError, match="found nothing to bind in LevitForImageClassification") as raised:
        opslot.build_foundation_model(tiny_config("levit"), architecture="LevitForImageClassification")
    assert "attention of LevitAttention: it computes attention itself" in str(raised.value)


@pytest.mark.parametrize("call", [opslot.apply, opslot.restore])
def test_non_module_raises(call):
    with pytest.raises(ConfigError, match=rf"opslot\.{call.__name__} takes a model, found 'path/to/model'"):
        call("path/to/model")


def test_replaced_forward_is_reported():
    model = original("qwen3")
    norm = model.model.norm
    norm.forward = norm.forward
    with pytest.raises(ConfigError, match=r"model\.norm: .*forward was replaced on this instance"):
        opslot.apply(model, {"rms_norm_implementation": "torch_fused"})
    report = opslot.apply(model, "auto")
    assert any(row.chosen == "eager" and row.modules == ("model.norm",) for row in report)


@pytest.mark.parametrize("arch", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe"])
def test_bound_models_can_be_copied_pickled_saved_and_compiled(arch, tmp_path):
    model = opslot.build_foundation_model(config_of(arch, num_hidden_layers=1))
    # Before the first forward: Transformers' hooks that record router logits are local functions, not picklable.
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False))
    expected, _ = run(model)
    for twin in twins:
        assert torch.equal(run(twin)[0].loss, expected.loss)
        assert opslot.explain(twin).rows == opslot.explain(model).rows
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain).__module__.startswith("transformers.")
    torch.testing.assert_close(run(plain)[0].loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled)[0].loss, expected.loss, rtol=1e-5, atol=1e-6)


def test_router_logits_are_captured_after_apply():
    model = original("qwen3_moe")
    opslot.apply(model)
    out, _ = run(model)
    assert len(out.router_logits) == 2
    assert out.aux_loss is not None


def test_router_logits_are_captured_after_restore_in_a_new_process(forks, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import torch, opslot
from transformers import Qwen3MoeConfig
config = Qwen3MoeConfig(vocab_size=97, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, output_router_logits=True)
model = opslot.restore(opslot.build_foundation_model(config))
assert type(model).__module__.startswith("transformers."), type(model)
print(len(model(input_ids=torch.ones(1, 4, dtype=torch.long)).router_logits))
""")
    out, err = forks.start(script).communicate()
    assert out.strip() == "1", err


def test_generation_equals_transformers():
    ids = torch.randint(1, 97, (1, 5), generator=torch.Generator().manual_seed(1))
    model = original("qwen3").eval()
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    opslot.apply(model)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_packed_documents_are_independent():
    model = opslot.build_foundation_model(config_of("qwen3")).eval()
    a, b = torch.randint(1, 97, (1, 6)), torch.randint(1, 97, (1, 9))
    packed = torch.cat([a, b], 1)
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    cu = torch.tensor([0, 6, 15], dtype=torch.int32)
    extra = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    separate = torch.cat([model(a).logits, model(b).logits], 1)
    together = model(packed, position_ids=positions, **extra).logits
    torch.testing.assert_close(together, separate, rtol=1e-4, atol=1e-5)
    by_positions = model(packed, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(by_positions, separate, rtol=1e-4, atol=1e-5)


def test_hf_backend_builds_the_original_class(monkeypatch):
    monkeypatch.setenv("OPSLOT_BACKEND", "hf")
    model = opslot.build_foundation_model(config_of("qwen3"))
    assert type(model) is transformers.Qwen3ForCausalLM
    monkeypatch.setenv("OPSLOT_BACKEND", "veomni")
    with pytest.raises(ConfigError, match="use opslot or hf"):
        opslot.build_foundation_model(config_of("qwen3"))


def test_hf_backend_names_kernels_that_are_not_used(monkeypatch, caplog):
    monkeypatch.setenv("OPSLOT_BACKEND", "hf")
    for ops in ("auto", "eager"):
        opslot.build_foundation_model(config_of("qwen3"), ops_implementation=ops)
    assert not caplog.records
    overrides = {"model.layers.0.*": {"rotary_pos_emb_implementation": "torch_fused"}}
    named = {"rms_norm_implementation": "torch_fused", "overrides": overrides}
    opslot.build_foundation_model(config_of("qwen3"), ops_implementation=named)
    (record,) = caplog.records
    kernels = "rms_norm_implementation=torch_fused, rotary_pos_emb_implementation=torch_fused"
    assert record.message == f"OPSLOT_BACKEND=hf, so these kernels are not used: {kernels}"


def test_folder_of_a_run_is_not_a_config(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"folder of a run: give {tmp_path}/hf"):
        opslot.build_foundation_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file or folder"),
        ("{", "is not valid JSON"),
        ("{}", "names no model_type"),
        ('{"model_type": "qwen33"}', "did you mean 'qwen3'"),
        ('{"model_type": "qwen3", "hidden_size": "wide"}', "not a valid qwen3 config"),
    ],
)
def test_invalid_configs_raise(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        opslot.build_foundation_model(path)


def test_invalid_arguments_raise():
    for dtype in ("int8", torch.int8, 16):
        with pytest.raises(ConfigError, match="is not a floating dtype"):
            opslot.build_foundation_model(config_of("qwen3"), torch_dtype=dtype)
    with pytest.raises(ConfigError, match="device 'gpu0' is not a valid device"):
        opslot.build_foundation_model(config_of("qwen3"), init_device="gpu0")
    with pytest.raises(ConfigError, match="config_path=None is not a path or a config\n  hint: give a folder"):
        opslot.build_foundation_model(None)
    with pytest.raises(ConfigError, match="without memory"):
        opslot.build_foundation_model(config_of("qwen3"), "somewhere", init_device="meta")
    with pytest.raises(ConfigError, match=r"opslot\.generated\.qwen3 has no class 'Qwen3ForImages'"):
        opslot.build_foundation_model(config_of("qwen3"), architecture="Qwen3ForImages")


def test_meta_models_are_bound_for_the_local_device():
    model = opslot.build_foundation_model(config_of("qwen3_moe"), init_device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert len(opslot.explain(model)) >= 5


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_next", "mamba2"])
def test_bound_models_run_on_meta(arch):
    """As Transformers' do, for example to count FLOPs."""
    config = tiny_config(arch)
    config.mlp_only_layers = list(range(config.num_hidden_layers))
    model = AutoModelForCausalLM.from_config(config)
    opslot.apply(model)
    model.to("meta")
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.is_meta
    assert all(p.grad.is_meta for p in model.parameters())


def test_each_model_in_a_module_gets_its_attention():
    pair = torch.nn.ModuleDict({"teacher": original("qwen3"), "student": original("qwen3_moe")})
    before = [m.config._attn_implementation for m in pair.values()]
    overrides = {"teacher": {"attn_implementation": "eager"}}
    report = opslot.apply(pair, {"attn_implementation": "sdpa", "overrides": overrides})
    assert [m.config._attn_implementation for m in pair.values()] == ["eager", "opslot_sdpa"]
    assert {r.modules: r.chosen for r in report if r.op == "attention"} == {
        ("teacher",): "eager",
        ("student",): "sdpa",
    }
    opslot.restore(pair)
    assert [m.config._attn_implementation for m in pair.values()] == before


def test_evaluation_returns_logits():
    reference = original("qwen3").eval()
    model = ours("qwen3", reference, {"cross_entropy_loss_implementation": "chunk_loss"}).eval()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        found, expected = model(input_ids=ids, labels=ids), reference(input_ids=ids, labels=ids)
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.loss, expected.loss)
        with opslot.loss_only(model):
            alone = model(input_ids=ids, labels=ids)
        assert alone.logits is None
        torch.testing.assert_close(alone.loss, expected.loss)
        assert model(input_ids=ids, labels=ids).logits is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("applied", [False, True], ids=["built", "applied"])
def test_model_moved_to_a_gpu_is_bound_again(applied, caplog):
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "dtype": "bfloat16"}
    config = config_of("qwen3", **wide)
    if applied:
        model = transformers.Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
        opslot.apply(model)
    else:
        model = opslot.build_foundation_model(config)
    on_cpu = {(row.op, row.variant): row.chosen for row in opslot.explain(model).rows}
    model.cuda()
    ids = torch.arange(90, device="cuda").view(2, 45)
    model(input_ids=ids, labels=ids).loss.backward()
    assert "was bound for cpu and runs on cuda" in caplog.text
    moved = opslot.explain(model)
    there = opslot.build_foundation_model(config, init_device="cuda")
    assert str(moved) == str(opslot.explain(there))
    assert {(row.op, row.variant): row.chosen for row in moved.rows} != on_cpu
