"""DeepSeek-V4: positions restart at packed documents, and resizing the vocabulary resizes the tables of experts by
token id too."""

from __future__ import annotations

from opslot.patchgen import PatchConfig
from opslot.slots.protocol import ADOPT

patch = PatchConfig("transformers.models.deepseek_v4.modeling_deepseek_v4")
# Keys are compressed by position, counted from the start of the document.
patch.insert_before(
    "DeepseekV4Model.forward",
    "position_ids is None",
    """
if position_ids is None and kwargs.get("cu_seq_lens_q") is not None:
    position_ids = positions_in_documents(kwargs["cu_seq_lens_q"], inputs_embeds)
""",
)
patch.add_import("opslot.ops._common.documents", ["positions_in_documents"])
# New tokens take the experts of the first ones, which are spread over all experts.
patch.override_method(
    "DeepseekV4PreTrainedModel._resize_token_embeddings",
    f"""
def _resize_token_embeddings(self, *args, **kwargs):
    embeddings = super()._resize_token_embeddings(*args, **kwargs)
    self.{ADOPT}(embeddings)
    return embeddings
""",
)
# The vocabulary may have been resized before `opslot.apply`.
patch.add_final_block(
    f"""
def _resize_tables(self, embeddings=None):
    rows = (self.get_input_embeddings() if embeddings is None else embeddings).weight.shape[0]
    for router in self.modules():
        if isinstance(router, DeepseekV4HashRouter) and len(router.tid2eid) != rows:
            table = router.tid2eid
            router.tid2eid = table[torch.arange(rows, device=table.device) % len(table)]


DeepseekV4PreTrainedModel.{ADOPT} = _resize_tables
"""
)
