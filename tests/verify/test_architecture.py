"""check_architecture passes correct architectures and names the failure in others."""

import json
import logging
import re
from logging.handlers import BufferingHandler
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoConfig, Qwen3Config

from opslot import KERNEL_REGISTRY, KernelSpec
from opslot._base.errors import ConfigError
from opslot.cli import main
from opslot.ops.attention import masks
from opslot.slots import binding_of
from opslot.verify import CHECKS, architecture, check_architecture, config_checks, media
from opslot.verify.bisect import bisect
from opslot.verify.isolated import Processes
from opslot.verify.random_model import class_of, packed_batches, random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config, tiny_configs
from opslot.verify.tiny_sizes import GPU_SIZES

FIELD = "rms_norm_implementation"
ONE_PROCESS = ("eager", "auto", "packed", "frozen", "checkpoint")


@pytest.fixture(scope="module")
def processes(forked_workers):
    with Processes(2) as pool:
        yield pool


@pytest.mark.quick("gemma3_text", "qwen3_next")
@pytest.mark.parametrize("arch", ["qwen3_moe", "gemma3_text", "qwen3_next"])
def test_supported_architecture_passes(arch):
    found = check_architecture(arch, checks=ONE_PROCESS)
    assert found.ok, str(found)
    assert found.arch == arch
    assert not found.problems
    assert {row.chosen for row in found.kernels} - {"eager"}
    assert str(found).startswith(f"{arch}: passed\n")
    assert found["eager"].detail == "loss and gradients equal Transformers' bit for bit"
    assert [outcome.name for outcome in found.outcomes] == list(ONE_PROCESS)


# Decoder layers of Nemotron do not pass their keyword arguments to attention.
@pytest.mark.quick("nemotron")
@pytest.mark.parametrize("arch", ["qwen3", "nemotron"])
def test_compiled_model_equals_uncompiled(arch):
    outcome = check_architecture(arch, checks=["compiled"])["compiled"]
    assert outcome.detail == "one graph; equals the model uncompiled, with padding and packed documents"


def test_compiled_check_does_not_need_transformers_own_model(monkeypatch):
    """Some raise where opslot's run: Llama 4 with images in 5.24, delta rules of fla on GPUs with an older Triton."""

    def fail(*args):
        raise config_checks._NoReference("Transformers raises")

    monkeypatch.setattr(config_checks, "_of_transformers", fail)
    assert check_architecture("llama", checks=["compiled"])["compiled"].result == "passed"


def test_compiled_model_without_the_window_of_its_mask_fails(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(masks, "_compiled", lambda given: None)
    config = tiny_config("phimoe")
    config.sliding_window = 5
    found = check_architecture(config, checks=["compiled"])
    assert re.search(r"compiled: padding: .+ differs by", found.problems[0])


def test_compiled_kernels_that_break_the_graph_on_a_cpu_are_named(monkeypatch):
    monkeypatch.setattr(config_checks, "_BY_DOCUMENT", ())
    outcome = check_architecture("qwen3_next", checks=["compiled"])["compiled"]
    assert outcome.result == "unsupported"
    assert outcome.detail == "packed documents: torch_chunked reads the lengths of packed documents"


def test_config_of_an_encoder_logs_no_warning_of_other_models():
    """Default configs of the models that may have it are made, and that of Qwen2.5-Omni warns of its token ids."""
    handler = BufferingHandler(100)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        tiny_config("clip")
    finally:
        logger.removeHandler(handler)
    assert not handler.buffer


def test_auto_runs_the_fused_loss_of_larger_vocabularies(monkeypatch):
    logits = []

    def spy(model, batch):
        logits.append(model(**batch).logits)
        return bisect(model, batch)

    monkeypatch.setattr(config_checks, "bisect", spy)
    assert check_architecture("llama", checks=["auto"]).ok
    assert logits == [None]


@pytest.mark.quick("qwen3_moe")
@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek_v3", "qwen2_5_vl"])
def test_supported_architecture_passes_in_bfloat16(arch):
    found = check_architecture(arch, dtype="bfloat16")
    assert found.ok, str(found)
    assert [outcome.name for outcome in found.outcomes] == ["auto", "packed", "compiled"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "arch", ["qwen3_moe", "gemma2", "gemma4_text", "deepseek_v32", "qwen3_next", "phi4_multimodal", "qwen2_5_vl"]
)
def test_supported_architecture_passes_on_a_gpu(arch):
    found = check_architecture(arch, device="cuda", dtype="bfloat16")
    assert found.ok, str(found)


def test_compiled_model_that_differs_in_bfloat16_is_named(monkeypatch):
    def ignores_padding(model, batch):
        return train_step(model, [{**batch, "attention_mask": None}])

    monkeypatch.setattr(config_checks, "compiled_step", ignores_padding)
    found = check_architecture("llama", checks=["compiled"], dtype="bfloat16")["compiled"]
    assert found.result == "failed"
    assert re.match(r"padding: error of the (loss|gradients) .*, that of the model uncompiled", found.detail)


def test_compiled_model_that_differs_in_16_bits_runs_its_own_kernels_in_float32(monkeypatch):
    ran = []

    def step(model, batch):
        ran.append((model.dtype, {slot.resolution.chosen for slot in binding_of(model)[1].slots}))
        return train_step(model, [batch])

    monkeypatch.setattr(config_checks, "compiled_step", step)
    monkeypatch.setattr(config_checks, "_further", lambda *_: "differs")
    assert check_architecture("qwen3_moe", "eager", checks=["compiled"], dtype="bfloat16").ok
    # With padding, and with packed documents.
    assert ran == [(torch.bfloat16, {"eager"}), (torch.float32, {"eager"})] * 2


def test_packing_in_bfloat16_that_differs_is_named(monkeypatch):
    def documents_as_one(ids, rows=1):
        packed, alone = packed_batches(ids, rows)
        ends = torch.tensor([0, ids[:rows].numel()], dtype=torch.int32)
        whole = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "position_ids": torch.arange(ids.shape[1])[None]}
        return [{**packed[0], **whole, "max_length_q": ids.shape[1], "max_length_k": ids.shape[1]}], alone

    monkeypatch.setattr(config_checks, "packed_batches", documents_as_one)
    found = check_architecture("llama", checks=["packed"], dtype="bfloat16")["packed"]
    assert found.result == "failed"
    assert re.match(r"error of the (loss|gradients) .*, that of Transformers' code", found.detail)


@pytest.mark.quick("packed")
@pytest.mark.parametrize("check", ["packed", "compiled"])
def test_sparse_attention_is_compared_in_float32_where_16_bits_differ(check, monkeypatch):
    dtypes = []

    def differs(found, *_):
        dtypes.append({gradient.dtype for gradient in found.values()})
        return "differs"

    monkeypatch.setattr(config_checks, "_further", differs)
    found = check_architecture("deepseek_v32", dtype="bfloat16", checks=(check,))
    assert found.ok, str(found)
    # One row, and a batch of rows; compiled, with padding and with packed documents.
    assert [torch.bfloat16 in kinds for kinds in dtypes] == [True] * 2


def test_checks_for_float32_on_a_cpu_raise_elsewhere():
    with pytest.raises(
        ConfigError, match=r"(?s)check 'eager' is for float32 on the CPU.*bfloat16 on cpu.*auto, packed, comp"
    ):
        check_architecture("llama", checks=["eager"], dtype="bfloat16")
    with pytest.raises(ConfigError, match="dtype 'int8' is not a floating dtype"):
        check_architecture("llama", dtype="int8")


def test_gpu_sizes_are_used_where_a_config_class_takes_them():
    assert next(tiny_configs("qwen3", GPU_SIZES)).head_dim == 64
    assert [config.hidden_size for config in tiny_configs("bamba", GPU_SIZES)][-1] == 32


def test_packed_leaves_out_a_z_loss():
    config = tiny_config("bamba")
    config.z_loss_coefficient = 0.5
    found = check_architecture(config, checks=["packed"])["packed"]
    assert (found.result, found.detail) == ("passed", "equals the documents alone, without the z-loss")


def test_checks_on_two_processes(processes):
    found = check_architecture("qwen3_moe", checks=("fsdp", "sp", "ep"), processes=processes)
    assert [(o.name, o.result) for o in found.outcomes] == [("fsdp", "passed"), ("sp", "passed"), ("ep", "passed")]
    dense = check_architecture("llama", checks=["ep"], processes=processes)["ep"]
    assert (dense.result, dense.detail) == ("unsupported", "ep=2, but llama has no experts")


@pytest.mark.parametrize(
    ("arch", "rope"),
    [
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
def test_frequencies_depend_on_positions_of_all_ranks(processes, arch, rope):
    given = {**tiny_config(arch).to_dict(), "max_position_embeddings": 15, "original_max_position_embeddings": 15}
    given["rope_parameters"] = {"rope_theta": 10000.0, "original_max_position_embeddings": 15, **rope}
    config = AutoConfig.for_model(**given)
    found = check_architecture(config, checks=["sp"], processes=processes)
    assert found.ok, str(found)


def test_encoder_decoder_passes(processes):
    """T5's encoder and decoder have copies of the model's config."""
    found = check_architecture("mt5", checks=["eager", "auto", "packed", "fsdp"], processes=processes)
    assert found.ok, str(found)
    assert found["packed"].result == "unsupported"


def test_masked_language_model_passes(processes):
    found = check_architecture("distilbert", checks=["eager", "auto", "fsdp"], processes=processes)
    assert found.ok, str(found)


def test_load_balancing_loss_is_left_out_where_it_is_no_sum(processes):
    config = tiny_config("qwen3_moe")
    config.output_router_logits = True
    found = check_architecture(config, checks=["auto", "packed", "fsdp"], processes=processes)
    assert found.ok, str(found)
    left_out = {name: "without the load-balancing loss" in found[name].detail for name in ("auto", "packed", "fsdp")}
    assert left_out == {"auto": False, "packed": True, "fsdp": True}


def test_difference_between_processes_is_named(processes, monkeypatch):
    step = config_checks.train_step
    monkeypatch.setattr(config_checks, "train_step", lambda *args: {n: v * 1.01 for n, v in step(*args).items()})
    found = check_architecture("llama", checks=["fsdp"], processes=processes)
    assert not found.ok
    assert "differs by" in found["fsdp"].detail


def test_documents_that_see_each_other_are_named(monkeypatch):
    packed = config_checks.packed_batches

    def one_document(ids, rows):
        (whole,), alone = packed(ids, rows)
        kept = {name: value for name, value in whole.items() if name in ("input_ids", "labels", "num_items_in_batch")}
        return [{**kept, "position_ids": torch.arange(ids.shape[1]).expand(rows, -1)}], alone

    monkeypatch.setattr(config_checks, "packed_batches", one_document)
    found = check_architecture("llama", checks=["packed"])
    assert found["packed"].result == "failed"
    assert "differs by" in found["packed"].detail


def test_checkpoint_that_differs_is_named(monkeypatch):
    save = config_checks.save_weights

    def broken(model, folder):
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        save(model, folder)

    monkeypatch.setattr(config_checks, "save_weights", broken)
    found = check_architecture("llama", checks=["checkpoint"])["checkpoint"]
    assert (found.result, found.detail) == ("failed", "saved by opslot: model.norm.weight differ")


def test_unknown_check_raises():
    with pytest.raises(ConfigError, match=r"unknown check 'speed'\n  hint: use eager, auto, packed"):
        check_architecture("llama", checks=["speed"])


def test_json_has_every_check(capsys):
    assert main(["discover", "llama", "--checks", "eager,packed", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"] is True
    assert {name: check["result"] for name, check in report["check"]["checks"].items()} == {
        "eager": "passed",
        "packed": "passed",
    }
    assert CHECKS == ("eager", "auto", "packed", "compiled", "frozen", "fsdp", "sp", "ep", "checkpoint")


def test_worst_difference_reports_nan():
    wanted = {"loss": torch.ones(()), "grad a": torch.ones(3)}
    assert worst_difference(wanted, wanted) == ""
    assert worst_difference({**wanted, "grad a": torch.full((3,), torch.nan)}, wanted).startswith(
        "grad a differs by nan"
    )


def test_wrong_kernel_is_named():
    right = KERNEL_REGISTRY.load("rms_norm", "standard", "torch_fused")
    wrong = lambda hidden_states, weight, eps: right(hidden_states, weight, eps) * 1.001  # noqa: E731
    KERNEL_REGISTRY.register(KernelSpec("broken", "rms_norm", "standard", lambda: wrong))
    try:
        found = check_architecture("qwen3", {FIELD: "broken"}, checks=["eager", "auto"])
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "broken")
    assert not found.ok
    assert found["eager"].result == "passed"
    assert f"{FIELD}=broken at model" in str(found)
    assert str(found).startswith("qwen3: failed\n")


def test_eager_difference_is_named(monkeypatch):
    from opslot.generated.qwen3 import Qwen3Attention

    forward = Qwen3Attention.forward
    monkeypatch.setattr(
        Qwen3Attention, "forward", lambda self, *a, **k: (forward(self, *a, **k)[0] * (1 + 2**-8), None)
    )
    found = check_architecture("qwen3", "eager", checks=["eager"])
    assert not found.ok
    assert found.problems[0].startswith("eager: differs from Transformers in loss, grad model.embed_tokens.weight")


def test_config_is_not_changed():
    config = Qwen3Config(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=41,
    )
    before = config.to_dict()
    assert check_architecture(config, checks=ONE_PROCESS).ok
    assert config.to_dict() == before


def test_architecture_without_slots_fails():
    found = check_architecture("xlm")
    assert not found.ok
    assert "found nothing to bind" in found.error


def test_error_of_transformers_has_a_hint(monkeypatch):
    def fail(config):
        raise ValueError("sizes do not fit")

    monkeypatch.setattr(architecture, "random_model", fail)
    tiny, given = (check_architecture(arch, checks=[]).error for arch in ("llama", tiny_config("llama")))
    assert tiny.startswith("raised ValueError: sizes do not fit\n  hint: Transformers' own model of the tiny config")
    assert given.endswith("hint: Transformers' own model of this config raises it")


def test_model_without_a_language_model_cannot_be_checked():
    error = check_architecture("vit", checks=[]).error
    assert error.startswith("Transformers has no language model of model_type 'vit', whose loss could be checked\n")


def test_model_without_a_vocabulary_cannot_be_checked():
    error = check_architecture("pi0", checks=["eager"]).error
    assert error.startswith("the config of model_type 'pi0' has no vocab_size, so that ids of text are unknown\n")


def test_unknown_architecture_raises():
    with pytest.raises(ConfigError, match=r"no architecture 'qwen33'(.*\n)+  hint: did you mean .*'qwen3'"):
        check_architecture("qwen33")


# What each tiny config must keep of its architecture.
STRUCTURE = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8},
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "n_group": 2,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "exaone_moe": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gemma3n_text": {"num_kv_shared_layers": 4, "num_hidden_layers": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("arch", STRUCTURE)
def test_tiny_config_keeps_the_structure(arch):
    config = tiny_config(arch)
    assert {name: getattr(config, name) for name in STRUCTURE[arch]} == STRUCTURE[arch]
    assert sum(p.numel() for p in random_model(config).parameters()) < 300_000


def test_settings_that_a_config_gives_to_its_parts_are_kept():
    config = tiny_config("got_ocr2")
    assert type(config.text_config)().tie_word_embeddings is False
    assert config.text_config.tie_word_embeddings is True


def test_special_tokens_are_in_the_vocabulary():
    config = tiny_config("kyutai_speech_to_text")
    assert max(config.audio_bos_token_id, config.audio_pad_token_id) < config.vocab_size


def test_switched_off_parts_stay_off():
    assert tiny_config("kimi_linear").q_lora_rank is None
    assert tiny_config("gemma4_text").num_kv_shared_layers == 0


def test_experts_without_a_slot_are_checked_in_fp64():
    """Transformers' grouped GEMM of experts does not take float64."""
    assert check_architecture("nemotron_h", checks=["auto"]).ok


def test_models_inside_run_the_same_code():
    """Binding to eager may give a model inside another attention than its own default."""
    assert check_architecture("mistral3", checks=["eager"]).ok


def test_images_and_videos(processes):
    found = check_architecture("qwen3_vl", checks=("eager", "packed", "sp"), processes=processes)
    assert found.ok, str(found)
    assert found.samples == ("text", "image", "video", "mixed")
    assert "samples: text, image, video, mixed" in str(found)
    assert {outcome.result for outcome in found.outcomes} == {"passed"}


def test_missing_videos_have_a_reason():
    found = check_architecture("llava", checks=["eager"])
    assert found.ok, str(found)
    assert found.samples == ("text", "image")
    assert found.missing["video"] == "it takes no videos"
    assert json.loads(json.dumps(found.to_dict()))["missing"]["video"] == "it takes no videos"


def test_images_that_cannot_be_made_leave_the_checks_of_text(monkeypatch):
    monkeypatch.setattr(media, "visual_inputs", lambda *_: None)
    found = check_architecture("llava", checks=["eager"])
    assert found.ok, str(found)
    assert found.samples == ("text",)
    assert found.missing["image"] == "the inputs of LlavaModel.get_image_features are unknown"


@pytest.mark.parametrize(
    ("arch", "samples"),
    [
        pytest.param("llama4", ("text", "image"), marks=pytest.mark.slow),
        pytest.param("pixtral", ("text", "image"), marks=pytest.mark.slow),
        pytest.param("gemma4", ("text", "image", "video", "audio", "mixed"), marks=pytest.mark.slow),
        ("qwen2_5_omni", ("text", "image", "video", "audio", "mixed")),
        pytest.param("qwen3_omni_moe", ("text", "image", "video", "audio", "mixed"), marks=pytest.mark.slow),
        ("voxtral", ("text", "audio")),
        pytest.param("granite_speech", ("text", "audio"), marks=pytest.mark.slow),
    ],
)
def test_every_modality_is_checked(arch, samples):
    found = check_architecture(arch, checks=["eager", "packed", "frozen"])
    assert found.ok, str(found)
    if arch == "llama4" and "no attribute 'image_outputs'" in found.missing.get("image", ""):
        pytest.skip("Transformers 5.24 raises for every input of Llama4ForConditionalGeneration")
    assert found.samples == samples
    assert {outcome.result for outcome in found.outcomes} == {"passed"}


@pytest.mark.quick("minicpmv4_6-*", "deepseek_vl_hybrid-*", "musicflamingo-*", "kosmos-2-*")
@pytest.mark.parametrize(
    ("arch", "samples"),
    [
        ("florence2", ("text", "image")),
        ("minicpmv4_6", ("text", "image", "video", "mixed")),
        # Tiles with a mask, and images in two sizes.
        ("granite_docling", ("text", "image")),
        ("deepseek_vl_hybrid", ("text", "image")),
        # Sizes that must have a ratio to the hidden size of another part.
        ("muse_glimmer", ("text", "image", "video", "mixed")),
        ("fun_asr_nano", ("text", "audio")),
        # Masks and sizes that the parameters of the forward name.
        ("mllama", ("text", "image")),
        # Features that depend on the tokens.
        ("musicflamingo", ("text", "audio")),
        # A grid of tokens.
        ("inkling2", ("text", "image")),
        # Placed by a mask.
        ("kosmos-2", ("image",)),
    ],
)
def test_other_forms_of_images(arch, samples):
    found = check_architecture(arch, checks=["eager"])
    assert found.ok, str(found)
    assert found.samples == samples


@pytest.mark.quick("qwen2_audio-*", "fuyu-*")
@pytest.mark.parametrize(
    ("arch", "samples"),
    [
        # The forward computes features without a method for it, from masks and sizes that its parameters name.
        ("qwen2_audio", ("text", "audio")),
        ("mllama", ("text", "image")),
        ("phi4_multimodal", ("text", "image", "audio", "mixed")),
        ("git", ("image",)),
        ("blip", ("image",)),
        ("idefics", ("image",)),
        ("kosmos-2", ("image",)),
        # Projected patches, pooled patches, images as tokens, an encoder that reads the question.
        ("fuyu", ("text", "image")),
        ("molmo2", ("text", "image", "video")),
        ("chameleon", ("text", "image")),
        ("emu3", ("text", "image")),
        ("instructblip", ("image",)),
        ("instructblipvideo", ("video",)),
        # Rows and columns of patches; an optional audio encoder; videos are marked as images, so no sample has both.
        ("nemotron_h_omni", ("text", "image", "video", "audio")),
        ("unlimited_ocr", ("text", "image")),
        ("vibevoice_asr", ("text", "audio")),
        ("muse_spark", ("text", "image", "video", "audio", "mixed")),
        ("pp_formulanet", ("image",)),
    ],
)
def test_inputs_of_images_and_audio_are_derived(arch, samples):
    found = check_architecture(arch, checks=["eager", "auto", "frozen"])
    assert found.ok, str(found)
    assert found.samples == samples


def test_inputs_that_no_form_fits_have_a_reason(monkeypatch):
    monkeypatch.setattr(media.InlinedInputs, "forms", lambda *_: ())
    found = check_architecture("qwen2_audio", checks=["eager"])
    assert found.ok, str(found)
    reason = "Qwen2AudioForConditionalGeneration does not compute its loss from input_features"
    assert found.missing["audio"] == reason


def test_checks_against_a_model_that_transformers_does_not_run_have_no_result(monkeypatch):
    def raises(*args, **kwargs):
        raise RuntimeError("no attribute")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", raises)
    found = check_architecture("llama", checks=["eager", "frozen"])
    wanted = ("unsupported", "Transformers raises RuntimeError: no attribute")
    assert [(outcome.result, outcome.detail) for outcome in found.outcomes] == [wanted, wanted], str(found)


def test_kernels_that_refuse_a_model_that_transformers_does_not_run_have_no_result():
    config = tiny_config("llama")
    config.num_key_value_heads = 3
    found = check_architecture(config, checks=["eager", "auto", "packed", "frozen"])
    assert {outcome.result for outcome in found.outcomes} == {"unsupported"}, str(found)
    assert all("Transformers raises RuntimeError: The size of" in outcome.detail for outcome in found.outcomes)
    assert found.summary() == "llama: not checked"


@pytest.mark.quick("llama4")
@pytest.mark.parametrize("arch", ["llama4", "qwen2_5_omni", "voxtral"])
def test_modalities_on_two_processes(processes, arch):
    found = check_architecture(arch, checks=["fsdp", "sp"], processes=processes)
    assert [(o.name, o.result) for o in found.outcomes] == [("fsdp", "passed"), ("sp", "passed")], str(found)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["chameleon", "fuyu", "phi4_multimodal", "mllama"])
def test_derived_inputs_on_two_processes(processes, arch):
    """One process has text alone. Chameleon's own layers read the features."""
    found = check_architecture(arch, checks=["fsdp"], processes=processes)
    assert found.ok, str(found)


def test_frozen_parameter_with_a_gradient_is_named(monkeypatch):
    step = config_checks.train_step

    def leaking(model, batches):
        found = step(model, batches)
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.grad = torch.zeros_like(parameter)
        return found

    monkeypatch.setattr(config_checks, "train_step", leaking)
    found = check_architecture("llama", checks=["frozen"])["frozen"]
    assert (found.result, found.detail) == ("failed", "embeddings frozen: model.embed_tokens.weight has a gradient")


def test_other_gradient_beside_frozen_parts_is_named(monkeypatch):
    step = config_checks.train_step

    def scaled(model, batches):
        factor = 1.01 if type(model).__module__.startswith("opslot.generated") else 1
        return {name: value * factor for name, value in step(model, batches).items()}

    monkeypatch.setattr(config_checks, "train_step", scaled)
    found = check_architecture("gemma3", checks=["frozen"])["frozen"]
    assert found.result == "failed"
    assert found.detail.startswith("vision frozen: ")


def test_encoder_decoders_with_images_are_not_packed():
    found = check_architecture("t5gemma2", checks=("packed",))
    assert [(o.result, o.detail) for o in found.outcomes] == [
        ("unsupported", "its language model is not separate from its encoder")
    ]


class Detached(torch.nn.Linear):
    def forward(self, use_cache):
        return SimpleNamespace(loss=self.weight.detach().sum())


def test_loss_without_a_gradient_raises_unless_parameters_are_frozen():
    model = Detached(2, 2)
    with pytest.raises(RuntimeError, match="does not require grad"):
        train_step(model, [{}])
    model.bias.requires_grad_(False)
    assert not train_step(model, [{}])["grad weight"].any()


@pytest.mark.parametrize("arch", ["blt", "dots3_note_text", "esm", "luke", "mobilebert", "neomme", "roc_bert"])
def test_tiny_configs_make_tiny_models(arch):
    with torch.device("meta"):
        model = class_of(tiny_config(arch))(tiny_config(arch))
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
