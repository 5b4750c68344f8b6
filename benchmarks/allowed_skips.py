"""Why parts of the supported architectures keep Transformers' implementation.

A skip of a supported architecture that is not listed here fails `tests/models/test_supported.py`. Give the code a form
in `ops/<op>/forms.py`, or add it with the reason.
"""

from __future__ import annotations

# By op and reason, patterns (`fnmatch`) of classes and functions, after the architecture and a colon where they are of
# one.
ALLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "computes attention itself, without the interface that kernels are selected by": ("Gemma4AudioAttention",),
        "gets a mask of blocks even where FlashAttention runs, before 5.20": ("PixtralAttention",),
        "is in an image or audio tower, or attends to its output": (
            "*Vision*Attention",
            "*VisionTokenizerAttnBlock",
            "*CrossAttention",
        ),
    },
    "cross_entropy_loss": {
        "takes the logits of the ForCausalLM inside it, whose loss has the slot": ("Llama4ForConditionalGeneration",),
        "multiplies the logits by a learned scale per token": ("DoryForCausalLM",),
        "predicts speech codes with a head per generation step": (
            "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration",
        ),
    },
    "rms_norm": {
        "returns 1 / rms(x)": ("HYV4UnweightedRMSNorm", "HYV4VLUnweightedRMSNorm"),
        "is an audio tower's norm over time": ("Gemma3nAudioCumulativeGroupNorm",),
    },
    "rotary_pos_emb": {
        "rotates by trained angles": ("mistral_large4:apply_rotary_pos_emb_interleave",),
        "is not called, since the model has no positions": (
            "jamba:apply_rotary_pos_emb",
            "nemotron_h:apply_rotary_pos_emb",
        ),
    },
    "swiglu_mlp": {
        "scales gate and up, and normalizes their product": ("DoryMLP",),
    },
}
