"""The check `compiled`: torch.compile of a whole model, on packed documents and on padding."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported, UserError

from opslot._base.labels import IGNORE_INDEX
from opslot.verify.random_model import train_step

# In an error, the reason that opslot gave to torch.compiler.disable.
_DISABLED = re.compile(r"`torch\.compiler\.disable` \(reason: (?P<reason>[^)]+)\)")


def compiled_step(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The loss and gradients of a model in one graph, with the kernels that it has without torch.compile.

    Discards what torch.compile has compiled in this process: models share the function that it limits recompiles of.

    Raises:
        Unsupported, UserError: torch.compile breaks the graph; the second for sizes that depend on data.
    """
    model.compile(fullgraph=True, backend="aot_eager")
    try:
        return train_step(model, [batch])
    finally:
        model._compiled_call_impl = None
        torch._dynamo.reset()


def reason_of(error: Unsupported | UserError, original: Any, batch: dict[str, Any]) -> str:
    """Why a model need not be one graph; "" if it must.

    Args:
        error: what torch.compile raised for it.
        original: Transformers' own model.
    """
    disabled = _DISABLED.search(str(error))
    if disabled is not None:
        return disabled["reason"]
    try:
        compiled_step(original, batch)
    except (Unsupported, UserError):
        return "torch.compile breaks the graph of Transformers' own model"
    except Exception:
        # It takes no packed documents.
        return ""
    return ""


def padded_batch(ids: Tensor) -> dict[str, Any]:
    """Rows of ids [2, S], and of the same ids in reverse order, with padding on the left, on the right, on both sides
    and without any."""
    rows = torch.cat((ids, ids.flip(1)))
    third = ids.shape[1] // 3
    mask = torch.ones_like(rows)
    mask[0, :third] = mask[1, -third:] = mask[2, : third // 2] = mask[2, -third:] = 0
    # Without the first token, which is predicted from padding.
    labels = rows.masked_fill(mask.cumsum(1) * mask <= 1, IGNORE_INDEX)
    return {"input_ids": rows, "attention_mask": mask, "labels": labels}
