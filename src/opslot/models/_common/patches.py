"""Patches that several architectures share, with the upstream bodies that each slot may stand for."""

from __future__ import annotations

from collections.abc import Iterable

from opslot.patchgen import OpSlot, PatchConfig

# Fingerprints of upstream bodies (`opslot.patchgen.fingerprint`), each named for what it computes. A slot stands for
# these and no others; a release with another body raises, and its fingerprint is added once it is read and checked.

# weight * (x / rms(x)), normalised in fp32 and cast back before the weight.
LLAMA_RMS_NORM = "74308f676262"
# weight * (x / rms(x)), all of it in fp32, cast back last; also with the weight widened by name.
CAST_LAST_RMS_NORM = ("5d81960fd651", "29ec1ea12754")
# Those two with the normalised part, GEMMA_NORMALIZED, apart: Llama-4's, and Moshi's.
LLAMA4_RMS_NORM, MOSHI_RMS_NORM = "376dac74119d", "693c1a1f88b6"
# Llama's, then times silu(gate) in fp32, cast back.
GATED_RMS_NORM = "24fae62042bf"
# x / rms(x) in fp32, times (1 + weight) in fp32, cast back last; and its normalised part.
GEMMA_RMS_NORM, GEMMA_NORMALIZED = "fd8cae7324ce", "afb4c281cbb3"
# That part alone, cast back.
UNWEIGHTED_RMS_NORM = "59461105bbb1"
# (x1, x2) -> (-x2, x1), on the two halves of the last dimension; it decides what the rotation below means.
ROTATE_HALF = "3d488c0cec66"
# x * cos + rotate_half(x) * sin, for queries and keys, over the full head dimension.
ROTARY_FULL = "be80094eafa5"
# The same in fp32, with fp32 angles (OLMo) or named so (ModernBERT, HunYuan-VL), cast back.
ROTARY_FULL_CAST_LAST = ("05991b40438a", "f497ffb90cf6", "608a2b7a16b5")
# The same for one tensor.
ROTARY_SINGLE = "9fd25804c00b"
# The same for the first channels of a head, as many as cos has; the others pass.
ROTARY_PARTIAL = ("7eaf8d324cc4", "24f8d9a2e4fe", "33e92bf9aa90", "ff1b505dc9ad")
# By way of `_apply_rotary_emb` with an angle a pair, which turns halves (gpt-oss) or neighbouring channels.
ROTARY_BY_PARTS, PARTS_ARE_HALVES, PARTS_ARE_PAIRS = "53e758234267", "6e04c918052c", "5bfb91e9b47c"
# (x0, x1, ...) -> (-x1, x0, ...) on neighbouring channels, two ways to write it.
ROTATE_PAIRS, ROTATE_PAIRS_OF_LIST = "6f3523dffdca", "7f8ef8d4ac78"
# Neighbouring channels turn and stay in their places, with the first half of the angles: GLM-4's, Helium's; ERNIE
# 4.5's in fp32, cast back.
ROTARY_PAIRED, ROTARY_PAIRED_CAST_LAST = ("092e097bf36a", "9fb401b5b413"), "b7a7d38556e0"
# The same with as many angles as channels: GLM-4V's; Cohere's and ERNIE-4.5-VL's in fp32, cast back. BLT's is
# ROTARY_FULL with ROTATE_PAIRS_OF_LIST.
ROTARY_BY_CHANNEL, ROTARY_BY_CHANNEL_CAST_LAST = "aa3efe91972a", ("613cf3a05c96", "21a09e5fb4e2")
# Forwards of rotary embeddings that give neighbouring channels one angle, and what they merge three axes by.
ANGLES_BY_PAIRS = (("4102bfc785b5", None), ("bde94eb37424", "2b92f5b67232"), ("9b7b66695131", "d2ffb835b958"))
# Neighbouring channels are the pairs that turn; halves on the way out. Until 5.17 by way of rotate_half.
ROTARY_INTERLEAVED, ROTARY_INTERLEAVED_BY_HALVES = "652a20e8c59c", "15340b7ac99e"
# The same over the full head dimension in fp32, [S, heads, D], cast back.
ROTARY_VISION = "a4ac2dbfb6ed"
# softmax(scale q k + mask) v over grouped heads.
EAGER_ATTENTION = "3a13cdc4bee1"
# Decoder layers that mix tokens in `self_attn` alone: Llama's; OLMo-2's, Gemma-2's and GLM-4's with norms elsewhere;
# Mixtral's; Granite's with a multiplier; Cohere-2's in parallel; Phi-3's with dropout; gpt-oss's with router scores.
DECODER_LAYERS = (
    "617e1480c478",
    "a2fa8e7fd2fd",
    "23e62b388574",
    "29fde2c5739a",
    "a49891701291",
    "dde365270b90",
    "497dae538611",
    "03aeb224569a",
    "4845c99793cd",
)
# Sum over the chosen experts of weight * down(act(gate) * up); from 5.18 an index equal to num_experts adds nothing.
ROUTED_EXPERTS = ("d81e6d7d92e0", "eb94b9fca4df")
# The same with a gating of its own, `_apply_gate`; from 5.18 an index equal to num_experts adds nothing.
GATED_EXPERTS = ("00f4b681a538", "62e1dbd78bc1")
# The same with biases, and weights that lie transposed (gpt-oss).
BIASED_EXPERTS = "ccbf06b66aeb"
# Those gatings, gate and up one after the other: act(min(gate, limit)) * bounded up; silu in place of act, its limit
# called swiglu_limit; min(gate, limit) * sigmoid(alpha of it) * (1 + bounded up). The last also with gate, up in turn.
CLAMPED_GATE, CLAMPED_SILU_GATE, CLAMPED_ALPHA_GATE = "9656330a43f7", "73766c981cde", "0b8cf80fe18e"
INTERLEAVED_ALPHA_GATE = "8a227863cfdb"
# Switch Transformer's auxiliary loss over all layers; from 5.16 accumulated per layer in fp32, from 5.23 by histc.
LOAD_BALANCING_LOSS = ("c0ad95f69738", "e8f309a98210", "6d1c7fe46791")

# What a decoder layer does between attention and its MLP.
RESIDUAL_NORM = """\
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)"""

CLASSIFIER = "ForSequenceClassification"
# Heads that upstream's `Generic<head>` mixins implement, on a backbone that they ask AutoModel for.
GENERIC_HEADS = (CLASSIFIER, "ForTokenClassification", "ForQuestionAnswering")


def llama_like(arch: str, prefix: str) -> PatchConfig:
    """The patch of a dense decoder built like Llama; `prefix` begins its classes' names."""
    patch = PatchConfig(f"transformers.models.{arch}.modeling_{arch}", description=f"{prefix} with slots for kernels")
    patch.slot_method(
        f"{prefix}RMSNorm.forward",
        OpSlot("rms_norm", "standard"),
        args="hidden_states, self.weight, self.variance_epsilon",
        expects=LLAMA_RMS_NORM,
    )
    patch.slot_expr(
        f"{prefix}MLP.forward",
        OpSlot("swiglu_mlp", "standard"),
        "self.act_fn($gate) * $up",
        args="$gate, $up",
    )
    patch.slot_calls(
        "apply_rotary_pos_emb",
        OpSlot("rotary_pos_emb", "full"),
        expects={"apply_rotary_pos_emb": ROTARY_FULL, "rotate_half": ROTATE_HALF},
    )
    slot_heads(patch, prefix)
    slot_residual_norm(patch, prefix)
    record_outputs(patch)
    convert_checkpoints(patch, prefix)
    return patch


def slot_residual_norm(
    patch: PatchConfig, prefix: str, variant: str = "residual", args: str = "norm.weight, norm.variance_epsilon"
) -> None:
    """A slot for the residual addition after attention together with the norm that follows it.

    The other addition of a layer is followed by the next layer's norm, which a layer's own forward cannot reach.

    Args:
        variant: the one of rms_norm that extends the norm's own.
        args: the variant's arguments after the two terms of the sum, of the norm `norm`.
    """
    slot = OpSlot("rms_norm", variant)
    patch.replace(
        f"{prefix}DecoderLayer.forward",
        RESIDUAL_NORM,
        f"""
        norm = self.post_attention_layernorm
        if self.{slot.attribute} is not None and self.{slot.attribute}.can_serve(norm):
            hidden_states, residual = self.{slot.attribute}(hidden_states, residual, {args})
        else:
            $match
        """,
        slot=slot,
    )


def slot_heads(patch: PatchConfig, prefix: str) -> None:
    """Slots for the losses of the language-model head and of the sequence-classification head."""
    patch.slot_loss(f"{prefix}ForCausalLM.forward", OpSlot("cross_entropy_loss", "causal"))
    for head in GENERIC_HEADS:
        slot_generic_head(patch, prefix, head)
    patch.depends_on("transformers.loss.loss_utils", "ForCausalLMLoss", "ForSequenceClassificationLoss")
    patch.depends_on("transformers.loss.loss_utils", "fixed_cross_entropy")


def slot_generic_head(patch: PatchConfig, prefix: str, head: str) -> None:
    """Let one of `GENERIC_HEADS` stand on the generated backbone; a slot for the loss of the one that classifies."""
    layers = "transformers.modeling_layers"
    init = f"{prefix}{head}.__init__"
    patch.inherit_method(init, layers, f"Generic{head}.__init__")
    # Upstream's factory would build upstream's own backbone, which has no slots.
    patch.replace(init, "AutoModel.from_config(config)", f"{prefix}Model(config)")
    if head == CLASSIFIER:
        forward = f"{head}.forward"
        patch.inherit_method(f"{prefix}{forward}", layers, f"Generic{forward}")
        patch.slot_loss(f"{prefix}{forward}", OpSlot("cross_entropy_loss", "sequence_classification"))


def record_outputs(patch: PatchConfig) -> None:
    """Let upstream capture router logits and hidden states of instances that never ran `__init__` of their class.

    Upstream notes in `__init__` what a class can record. An instance that moved here from upstream's class, or was
    unpickled in another process, would silently record nothing, and a load-balancing loss would be zero.
    """
    patch.add_import("transformers.utils.output_capturing", names=["_CAN_RECORD_REGISTRY"])
    patch.add_final_block(
        """
        # Keys are the classes' names, as upstream writes them on the first instance.
        for _model_class in [value for value in globals().values() if isinstance(value, type)]:
            if issubclass(_model_class, PreTrainedModel) and _model_class.__module__ == __name__:
                dict.__setitem__(_CAN_RECORD_REGISTRY, str(_model_class), _model_class._can_record_outputs)
        """
    )
    patch.depends_on("transformers.utils.output_capturing", "install_all_output_capturing_hooks")


def convert_checkpoints(patch: PatchConfig, prefix: str) -> None:
    """Let Transformers convert checkpoints for the generated classes as it does for its own.

    Newer releases convert nothing for classes outside Transformers: `from_pretrained` would draw experts at random
    where the checkpoint has a tensor for each, and `save_pretrained` would write them in another layout than the hub's.
    """
    patch.add_final_block(
        f"""
        # A subclass in another module stays custom code, as a subclass of upstream's class is.
        {prefix}PreTrainedModel.is_custom_code = classmethod(lambda cls: cls.__module__ != __name__)
        """
    )


def keep_sequences_whole(patch: PatchConfig, classes: Iterable[str], why: str) -> None:
    """Refuse what needs a model that mixes tokens in its attention alone: packed documents, and parts of sequences."""
    patch.add_final_block("\n".join(f"{name}._opslot_keeps_sequences = {why!r}" for name in classes))
