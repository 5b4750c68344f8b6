"""Llama 4: layers without rotary embeddings scale queries by the position in the document, not in the row.

The model with images also runs on Transformers 5.24, where its own forward raises.
"""

from __future__ import annotations

from opslot.patchgen import PatchConfig
from opslot.slots.protocol import KEEPS_SEQUENCES

_ATTENTION = "Llama4TextAttention"

patch = PatchConfig("transformers.models.llama4.modeling_llama4")
# Rows with a mask of padding are one document each. There Transformers counts padding too, also where position_ids
# do not, as those of `generate` with padding on the left. With sequence parallelism only position_ids say where a
# rank's tokens are.
patch.insert_after(
    "Llama4TextModel.forward",
    "self.rotary_emb($*arguments)",
    """
    if attention_mask is not None and kwargs.get("cu_seq_lens_q") is None and get_parallel_state().sp == 1:
        position_ids = None
    """,
)
patch.add_import("opslot.distributed", ["get_parallel_state"])
patch.replace(
    "Llama4TextDecoderLayer.forward",
    "self.self_attn($*arguments)",
    "self.self_attn($*arguments, position_ids=position_ids)",
)
patch.replace(
    f"{_ATTENTION}.forward",
    "torch.arange(hidden_states.shape[1], device=hidden_states.device) + past_seen_tokens",
    '($match) if kwargs.get("position_ids") is None else kwargs["position_ids"]',
)
patch.replace(
    f"{_ATTENTION}.forward",
    "attn_scales.view((1, input_shape[-1], 1, 1))",
    "attn_scales.view((-1, input_shape[-1], 1, 1))",
)
patch.replace(
    "Llama4ForConditionalGeneration.forward",
    "self.language_model($*arguments)",
    "with_image_outputs($match, Llama4CausalLMOutputWithPast)",
)
patch.add_import("opslot.models.llama4.outputs", ["with_image_outputs"])
patch.set_attribute(_ATTENTION, KEEPS_SEQUENCES, None)
