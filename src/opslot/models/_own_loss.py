"""Models whose loss ignores `num_items_in_batch` and `shift_labels`: it is the mean over the labels of one call."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

_HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTextToText")
_LOSSES = ("CrossEntropyLoss", "cross_entropy", "loss_fct")


def averages_its_own_labels(model: Any) -> bool:
    """Whether a Transformers model with a language-model head computes its loss from its labels alone.

    Losses of its micro batches, and of ranks, are then not shares of one mean.
    """
    classes = (cls for cls in type(model).__mro__ if cls.__name__.endswith(_HEADS) and "forward" in vars(cls))
    found = next((cls for cls in classes if not cls.__name__.startswith("FSDP")), None)
    return found is not None and _averages(found)


@functools.cache
def _averages(cls: Any) -> bool:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))
    except (OSError, TypeError):
        return False
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {id(call): ast.unparse(call.func) for call in calls}
    losses = [call for call in calls if names[id(call)] == "self.loss_function"]
    if any(k.arg in (None, "num_items_in_batch") for call in losses for k in call.keywords):
        return False
    if "num_items_in_batch" in source:
        return False
    return bool(losses) or any(name.endswith(_LOSSES) for name in names.values())
