"""Packed documents do not attend to each other: logits and loss equal those of each document alone."""

import json

import pytest
import torch

import opslot
from opslot.data.collation import collate

DOCUMENTS = [[5, 9, 12, 7, 200, 31, 8], [44, 3, 9], [17], [5, 9, 12, 99, 100, 101, 102, 103, 104]]
SIZE = 10


def samples():
    """Three samples of ten tokens: documents 0 and 1, then 2 and 3, then document 0 and padding."""
    layout = [[0, 1], [2, 3]]
    packed = []
    for indices in layout:
        tokens = [t for i in indices for t in DOCUMENTS[i]]
        packed.append(
            {"input_ids": torch.tensor(tokens), "lengths": [len(DOCUMENTS[i]) for i in indices], "padding": 0}
        )
    padded = DOCUMENTS[0] + [0] * 3
    packed.append({"input_ids": torch.tensor(padded), "lengths": [7, 3], "padding": 3})
    return packed


# Transformers' grouped GEMM of experts does not take float64.
PLAIN = {"preset": "eager", "attn_implementation": "eager", "moe_implementation": "eager"}


@pytest.mark.parametrize("ops", ["auto", PLAIN, PLAIN | {"attn_implementation": "sdpa"}], ids=["auto", "eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama"])
def test_packed_documents_are_isolated(model_folder, ops, model_type):
    config = json.loads((model_folder / "config.json").read_text()) | {"model_type": model_type}
    file = model_folder / f"{model_type}.json"
    file.write_text(json.dumps(config))
    torch.manual_seed(0)
    model = opslot.build_foundation_model(file, torch_dtype="float64", ops_implementation=ops).eval()
    batch = collate(samples())
    labels = batch.pop("labels")
    with torch.no_grad():
        mixed = model(input_ids=batch["input_ids"], use_cache=False).logits.flatten(0, 1)
        together = model(**batch, use_cache=False).logits.flatten(0, 1)
        packed_loss = model(**batch, labels=labels, use_cache=False, num_items_in_batch=torch.tensor(1)).loss
        alone = [model(input_ids=torch.tensor([document]), use_cache=False).logits[0] for document in DOCUMENTS]
    offsets = batch["cu_seq_lens_q"].tolist()
    # Transformers' eager attention computes its softmax in fp32, whose sums depend on the sample length and the CPU.
    # Each probability has an error of a few eps, which each layer propagates to the logits. A token of another
    # document would change the logits by a factor of 1e-2 or more.
    in_fp32 = ops == PLAIN
    scale = max(logits.abs().max().item() for logits in alone)
    atol = 4 * model.config.num_hidden_layers * torch.finfo(torch.float32).eps * scale if in_fp32 else 1e-9
    for index, document in enumerate([0, 1, 2, 3, 0]):
        got = together[offsets[index] : offsets[index + 1]]
        torch.testing.assert_close(got, alone[document], rtol=0 if in_fp32 else 1e-9, atol=atol)
        if offsets[index] % SIZE:
            assert (mixed[offsets[index] : offsets[index + 1]] - alone[document]).abs().max() > 1000 * atol
    loss = sum(
        torch.nn.functional.cross_entropy(
            alone[i][:-1], torch.tensor(DOCUMENTS[i][1:], dtype=torch.long), reduction="sum"
        )
        for i in (0, 1, 2, 3, 0)
    )
    # Transformers computes the loss in fp32.
    assert packed_loss.item() == pytest.approx(loss.item(), rel=1e-6)
