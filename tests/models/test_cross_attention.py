"""Encoders, decoders and cross attention between them: as Transformers computes them, with padding on either side."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import one_hot
from transformers import AutoModelForSeq2SeqLM, WhisperConfig, WhisperForConditionalGeneration
from transformers.masking_utils import flash_attention_mask

import opslot
from opslot._base.errors import ConfigError, KernelError
from opslot.distributed import ParallelState
from opslot.models._sequence.ulysses import prepare_ulysses
from opslot.ops.attention.layout import Keys, Layout
from opslot.ops.attention.masks import reads_layout
from opslot.ops.attention.reference import reference
from opslot.slots import KERNEL_REGISTRY, binding_of
from opslot.slots.protocol import padding_read_outside, reads_padding
from opslot.verify.random_model import random_model, worst_difference
from opslot.verify.tiny import tiny_config
from opslot.verify.tiny_sizes import TEXT_VOCABULARY
from tests.models.tiny import with_noise
from tests.own_code import heads_robin

SOURCE = 9


def seq2seq(arch, implementation="sdpa"):
    torch.manual_seed(0)
    config = tiny_config(arch)
    return with_noise(AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation).float().eval())


def padding(kind):
    mask = torch.ones(3, SOURCE, dtype=torch.long)
    if kind == "between":
        mask[0, 3] = mask[1, 5:7] = 0
    else:
        mask[1, :4] = mask[2, :2] = 0
    return mask.flip(1) if kind == "right" else mask


def batch_of(model, kind, target):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (3, SOURCE), generator=generator)
    return {"input_ids": ids, "attention_mask": padding(kind), "labels": ids.flip(0)[:, :target].contiguous()}


def step(model, batch):
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": output.loss.detach(), "logits": output.logits.detach()}


def kernels_of(model):
    return {row.chosen for row in opslot.explain(model) if row.op == "attention"}


@pytest.mark.quick("bart")
@pytest.mark.parametrize("arch", ["bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "plbart"])
def test_padded_sources_equal_transformers_also_with_targets_of_their_length(arch):
    original = seq2seq(arch)
    model = copy.deepcopy(original)
    opslot.apply(model)
    assert kernels_of(model) == {"sdpa"}
    for target in (SOURCE, 6):
        for kind in ("right", "left", "between"):
            batch = batch_of(model, kind, target)
            assert not worst_difference(step(model, batch), step(original, batch)), (target, kind)


@pytest.mark.quick("bart")
@pytest.mark.parametrize("arch", ["bart", "t5gemma", "t5"])
def test_eager_is_bit_for_bit_and_generates_the_same(arch):
    original = seq2seq(arch, "eager")
    model = copy.deepcopy(original)
    opslot.apply(model, "eager")
    batch = batch_of(model, "left", SOURCE)
    found, expected = step(model, batch), step(original, batch)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    opslot.apply(model)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tokens = (m.generate(**given, max_new_tokens=6, do_sample=False) for m in (model, original))
    assert torch.equal(*tokens)


def test_whisper_equals_transformers():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(vocab_size=64, max_source_positions=10, max_target_positions=12, **sizes, **tokens)
    original = WhisperForConditionalGeneration(config).eval()
    model = copy.deepcopy(original)
    opslot.apply(model)
    assert kernels_of(model) == {"sdpa"}
    batch = {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 64, (2, 10))}
    assert not worst_difference(step(model, batch), step(original, batch))


def test_explain_names_the_reason_for_attention_with_a_position_bias():
    model = seq2seq("t5")
    report = str(opslot.apply(model))
    assert "eager (Transformers' sdpa)" in report
    assert "T5Attention passes position_bias to attention" in report


def test_packed_documents_of_attention_with_a_position_bias_raise():
    """Transformers' sdpa ignores their boundaries, so that tokens would see other documents."""
    model = seq2seq("t5")
    opslot.apply(model)
    ids = torch.arange(3, 12)[None]
    bounds = {"cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32), "max_length_q": 5}
    with pytest.raises(KernelError, match=r"(?s)T5Stack cannot keep packed documents.*passes position_bias"):
        model.encoder(input_ids=ids, **bounds)
    twin = opslot.restore(copy.deepcopy(model))
    assert twin.encoder(input_ids=ids, **bounds).last_hidden_state.shape == (1, 9, model.config.d_model)
    assert model.encoder(input_ids=ids).last_hidden_state.shape == (1, 9, model.config.d_model)


def test_sequence_parallelism_of_an_encoder_and_a_decoder_raises():
    model = seq2seq("bart")
    opslot.apply(model)
    _, binding = binding_of(model)
    with pytest.raises(ConfigError, match="its language model is not separate from its encoder"):
        prepare_ulysses(model, binding, ParallelState(sp=2))


def by_boundaries(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """An attention kernel that takes boundaries, as FlashAttention does, and no mask."""
    assert attention_mask is None
    if kwargs.get("cu_seq_lens_q") is None:
        return reference(module, query, key, value, None, scaling=scaling, **kwargs)
    q, k = (kwargs.pop(f"cu_seq_lens_{x}").tolist() for x in "qk")
    rows = [
        reference(module, query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], None, scaling=scaling, **kwargs)[0]
        for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False)
    ]
    return torch.cat(rows, 1), None


by_boundaries.mask_function = flash_attention_mask


@pytest.mark.parametrize("queries", [6, 4])
def test_kernels_without_masks_get_the_keys_that_are_not_padding(queries):
    """As many queries as keys are no documents."""
    module = nn.Module()
    module.is_causal = True
    query, key, value = (torch.randn(2, 2, n, 8) for n in (queries, 6, 6))
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    documents = torch.tensor([0, 3, 6, 12], dtype=torch.int32)
    given = {"cu_seq_lens_q": documents, "cu_seq_lens_k": documents, "max_length_q": 6, "max_length_k": 6}
    attend = reads_layout(by_boundaries)
    expected = reference(module, query, key, value, mask.bool()[:, None, None], is_causal=False)[0]
    layout = Layout(causal=False, cu_seqlens=documents, longest=6, keys=Keys.of(mask))
    for padded in (layout, mask):
        found = attend(module, query, key, value, padded, cross_attention=True, **given)[0]
        torch.testing.assert_close(found, expected)
    found = attend(module, query, key, value, None, cross_attention=True)[0]
    torch.testing.assert_close(found, reference(module, query, key, value, None, is_causal=False)[0])
    with pytest.raises(KernelError, match="cannot apply a dense mask"):
        attend(module, query, key, value, torch.zeros(2, 1, queries, 6), cross_attention=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_every_kernel_attends_to_padded_sources_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    original = seq2seq("bart").to("cuda", torch.bfloat16)
    names = [spec.name for spec in KERNEL_REGISTRY.specs("attention", "causal")]
    ran = []
    for kind in ("right", "between"):
        batch = {name: x.cuda() for name, x in batch_of(original, kind, SOURCE).items()}
        exact = step(copy.deepcopy(original).float(), batch)["logits"]
        bound = 2 * float((step(original, batch)["logits"].float() - exact).abs().max()) + 1e-2
        for name in names:
            model = copy.deepcopy(original)
            try:
                opslot.apply(model, {"attn_implementation": name})
            except ConfigError:
                continue
            ran.append(name)
            assert float((step(model, batch)["logits"].float() - exact).abs().max()) <= bound, name
    assert {"sdpa", "triton"} <= {*ran}


@pytest.mark.quick("siglip")
@pytest.mark.parametrize("arch", ["siglip", "siglip2"])
def test_output_of_a_last_position_that_is_padding(arch):
    """SigLIP's text embedding is the last position's, which attends to the tokens of the text."""
    pytest.importorskip("triton")
    config = tiny_config(arch).text_config
    model = getattr(transformers, f"{arch.capitalize()}TextModel")._from_config(config).float().eval()
    ids = torch.randint(3, config.vocab_size, (3, SOURCE), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": padding("right")}
    expected = model(**batch)
    opslot.apply(model, {"attn_implementation": "triton"})
    for name in ("pooler_output", "last_hidden_state"):
        torch.testing.assert_close(getattr(model(**batch), name), getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_only_the_own_heads_of_a_model_read_padding():
    """The pooling head of Phi-4 multimodal's image encoder reads the first patch; its decoder reads no padding."""
    model = random_model(tiny_config("phi4_multimodal"))
    opslot.apply(model, "eager")
    image_encoder = model.model.embed_tokens_extend.image_embed.img_processor
    assert (reads_padding(model), reads_padding(model.model), reads_padding(image_encoder)) == (None, None, "first")


@pytest.mark.parametrize(("arch", "kernel"), [("bert", "triton"), ("bert", "sdpa"), ("llama", "sdpa")])
@pytest.mark.parametrize("side", ["left", "right"])
def test_question_answering_reads_padding(arch, kernel, side):
    """Its loss compares all positions, so those of padding must be what Transformers' sdpa makes of them."""
    if kernel == "triton":
        pytest.importorskip("triton")
    config = tiny_config(arch)
    original = getattr(transformers, f"{arch.capitalize()}ForQuestionAnswering")._from_config(config).float().eval()
    ids = torch.randint(3, config.vocab_size, (3, SOURCE), generator=torch.Generator().manual_seed(0))
    answers = torch.full((3,), SOURCE - 1 if side == "left" else 0)
    batch = {"input_ids": ids, "attention_mask": padding(side), "start_positions": answers, "end_positions": answers}

    def gradients(model):
        loss = model(**batch).loss
        return {"loss": loss.detach(), "weight": torch.autograd.grad(loss, model.get_input_embeddings().weight)[0]}

    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": kernel})
    assert not worst_difference(gradients(model), gradients(original))


@pytest.mark.parametrize("kernel", ["triton", "sdpa"])
@pytest.mark.parametrize("name", ["Wav2Vec2ForAudioFrameClassification", "Wav2Vec2ForCTC"])
def test_frames_of_padding(name, kernel):
    """The loss of one-hot labels is of all frames, and an adapter convolves those of padding with others."""
    if kernel == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=[8, 8],
        conv_stride=[5, 4],
        conv_kernel=[10, 4],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        attention_dropout=0.0,
        apply_spec_augment=False,
        add_adapter=name.endswith("CTC"),
        num_adapter_layers=1,
    )
    original = getattr(transformers, name)(config).eval()
    values, mask = torch.randn(2, 250), torch.ones(2, 250, dtype=torch.long)
    mask[0, 150:] = 0
    labels = torch.tensor([[1, 2], [3, 4]])
    if not config.add_adapter:
        labels = one_hot(torch.randint(0, 2, original(values).logits.shape[:2]), 2)
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": kernel})

    def gradients(model):
        loss = model(values, attention_mask=mask, labels=labels).loss
        weight = model.wav2vec2.feature_projection.projection.weight
        return {"loss": loss.detach(), "weight": torch.autograd.grad(loss, weight)[0]}

    assert not worst_difference(gradients(model), gradients(original))


@pytest.mark.quick("*-left-triton", "Bert*")
@pytest.mark.parametrize("kernel", ["triton", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "name",
    [
        "BertForSequenceClassification",
        "AlbertForSequenceClassification",
        "DistilBertForSequenceClassification",
        "RobertaForSequenceClassification",
        "ElectraForSequenceClassification",
    ],
)
def test_heads_of_the_first_position_read_padding(name, side, kernel):
    """In a row that is padded on the left it is padding, which attends to the tokens in Transformers."""
    if kernel == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    original = getattr(transformers, name)(tiny_config(name.partition("For")[0].lower())).eval()
    ids = torch.randint(3, original.config.vocab_size, (3, SOURCE), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": padding(side), "labels": torch.zeros(3, dtype=torch.long)}
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": kernel})

    def gradients(model):
        output = model(**batch)
        return {
            "logits": output.logits.detach(),
            "bias": torch.autograd.grad(output.loss, model.get_input_embeddings().weight)[0],
        }

    assert not worst_difference(gradients(model), gradients(original))


@pytest.mark.quick("ModernBert-*", "Bert-triton-RobinMean-right")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["RobinMean", "RobinFirst", "RobinSequential"])
@pytest.mark.parametrize(("arch", "kernel"), [("Bert", "triton"), ("Bert", "sdpa"), ("ModernBert", "sdpa")])
def test_heads_of_a_user_around_an_encoder_read_padding(arch, name, side, kernel):
    """Also where the head is in a module without a config, and ModernBERT's window hides keys."""
    if kernel == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    encoder = getattr(transformers, f"{arch}Model")._from_config(tiny_config(arch.lower())).eval()
    original = getattr(heads_robin, name)(encoder)
    ids = torch.randint(3, encoder.config.vocab_size, (3, SOURCE), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": padding(side)}
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": kernel})

    def gradients(model):
        output = model(**batch)
        weight = model.encoder.get_input_embeddings().weight
        return {"output": output.detach(), "weight": torch.autograd.grad(output.square().sum(), weight)[0]}

    assert not worst_difference(gradients(model), gradients(original))
    opslot.restore(model)
    assert padding_read_outside(model.encoder) is None
    assert type(model) is type(original)


@pytest.mark.parametrize("side", ["left", "right"])
def test_text_features_of_the_first_position_read_padding(side):
    """Chinese-CLIP reads it in `get_text_features`, outside of its text model."""
    torch.manual_seed(0)
    original = transformers.ChineseCLIPModel._from_config(tiny_config("chinese_clip")).eval()
    ids = torch.randint(3, original.text_model.config.vocab_size, (3, SOURCE))
    batch = {"input_ids": ids, "attention_mask": padding(side)}
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": "sdpa"})
    found, expected = (x.get_text_features(**batch).pooler_output for x in (model, original))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_projected_first_position_reads_padding(side):
    """AltCLIP's text embedding is that of the first position, from another tensor than the hidden states."""
    torch.manual_seed(0)
    original = transformers.AltCLIPTextModel._from_config(tiny_config("altclip").text_config).eval()
    ids = torch.randint(3, original.config.vocab_size, (3, SOURCE), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": padding(side)}
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": "sdpa"})
    found, expected = (x(**batch).pooler_output for x in (model, original))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_first_position_of_an_encoder_of_another_architecture_reads_padding(side):
    """ModernVBERT's classifier reads the first position of its ModernBERT."""
    torch.manual_seed(0)
    config = tiny_config("modernvbert")
    config.classifier_pooling = "cls"
    original = with_noise(transformers.ModernVBertForSequenceClassification(config)).eval()
    ids = torch.randint(3, TEXT_VOCABULARY, (3, SOURCE), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": padding(side)}
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": "sdpa"})
    torch.testing.assert_close(model(**batch).logits, original(**batch).logits, rtol=1e-4, atol=1e-5)


def compiled_batch(name, device="cpu"):
    """A model and a batch with padding on the left, on the right and on both sides of rows."""
    torch.manual_seed(0)
    config = tiny_config(name.partition("For")[0].lower())
    model = with_noise(getattr(transformers, name)(config).float().eval()).to(device)
    ids = torch.randint(3, config.get_text_config().vocab_size, (5, SOURCE), device=device)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 5:] = mask[2, 7:] = mask[2, :2] = 0
    labels = ids.flip(0) if config.is_encoder_decoder else ids.where(mask == 1, -100)
    if name.endswith("SequenceClassification"):
        labels = torch.zeros(5, dtype=torch.long, device=device)
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def losses_and_gradients(model, batch):
    found = step(model, batch)
    return {name.removeprefix("_orig_mod."): x for name, x in found.items() if name != "logits"}


@pytest.mark.quick("Bert*", "Bart*-6", "T5Gemma*")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("BertForSequenceClassification", SOURCE),
        ("ModernBertForMaskedLM", SOURCE),
        ("BartForConditionalGeneration", SOURCE),
        ("BartForConditionalGeneration", 6),
        ("T5GemmaForConditionalGeneration", SOURCE),
    ],
)
def test_compiled_encoders_and_cross_attention_with_padding_are_one_graph(name, targets):
    """`BertForSequenceClassification` reads the first position, which may be padding."""
    pytest.importorskip("triton")
    original, batch = compiled_batch(name)
    batch["labels"] = batch["labels"][..., :targets].contiguous()
    model = copy.deepcopy(original)
    opslot.apply(model, {"preset": "eager", "attn_implementation": "triton"})
    torch._dynamo.reset()
    found = losses_and_gradients(torch.compile(model, fullgraph=True, backend="eager"), batch)
    assert not worst_difference(found, losses_and_gradients(original, batch))


@torch.no_grad()
def test_compiled_heads_of_the_first_position_take_padding_on_the_right_of_windows():
    pytest.importorskip("triton")
    model, batch = compiled_batch("ModernBertForSequenceClassification")
    opslot.apply(model, {"attn_implementation": "triton"})
    compiled = torch.compile(model, backend="eager")
    right = {name: x[[1, 4]] for name, x in batch.items()}
    torch.testing.assert_close(compiled(**right).logits, model(**right).logits)
    with pytest.raises(RuntimeError, match="pad rows on the right"):
        compiled(**batch)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "ModernBertForMaskedLM", "BartForConditionalGeneration"]
)
@pytest.mark.parametrize("kernel", ["flash_attention_4", "triton", "auto"])
def test_compiled_encoders_and_cross_attention_with_padding_on_a_gpu(name, kernel):
    """Errors of the loss and of all gradients in bfloat16 are those of Transformers' attention, uncompiled."""
    if kernel != "auto" and (reason := KERNEL_REGISTRY.get("attention", "bidirectional", kernel).unsupported_here()):
        pytest.skip(reason)
    exact, batch = compiled_batch(name, "cuda")
    wanted = losses_and_gradients(exact, batch)
    eager, model = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    opslot.apply(model, {"preset": "eager", "attn_implementation": kernel})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain, found = (losses_and_gradients(m, batch) for m in (eager, compiled))
    for part, exact_part in wanted.items():
        allowed, error = ((x[part].float() - exact_part).norm() for x in (plain, found))
        assert error <= 2 * allowed + 2e-3 * exact_part.norm(), part
