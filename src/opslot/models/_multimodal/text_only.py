"""Batches of texts alone for models that also take images, videos or audio."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from opslot._base.errors import ConfigError
from opslot._base.source import forward_source, method_parameters
from opslot.models._multimodal.conditional import transformers_model
from opslot.models._multimodal.modalities import media_parameters
from opslot.slots.binding import class_name

# Of each token, its modality: 0 is text.
_TYPE_IDS = ("token_type_ids", "mm_token_type_ids")


def required_type_ids(model: nn.Module) -> list[str]:
    """The type ids without which a model such as Molmo2 raises while it trains; those of texts are zero."""
    model = transformers_model(model)
    taken = [name for name in _TYPE_IDS if name in method_parameters(type(model))]
    models = (module for module in (model.modules() if taken else ()) if hasattr(module, "base_model_prefix"))
    classes: set[Any] = {type(module) for module in models}
    return [name for name in taken if any(_raises_without(cls, name) for cls in classes)]


@contextlib.contextmanager
def missing_media_error(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError where a model's own code refuses to compute texts without images, videos or audio."""
    try:
        yield
    except (TypeError, ValueError) as error:
        whole = transformers_model(model)
        if not media_parameters(whole) or not _is_about_inputs(whole, error):
            raise
        raise ConfigError(
            f"{class_name(whole)} cannot train on texts without images, videos or audio",
            found=str(error),
            hint="train it with task: vlm on conversations that all have media, or train a model of texts",
        ) from error


def _raises_without(cls: Any, name: str) -> bool:
    """Whether a forward has `if ... name is None: raise`."""
    source = forward_source(cls)
    branches = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)) if name in source else ()
    return any(isinstance(node.body[0], ast.Raise) and f"{name} is None" in ast.unparse(node.test) for node in branches)


def _is_about_inputs(model: nn.Module, error: Exception) -> bool:
    """Whether the code of the model raised, or one of its forwards was called without a required argument."""
    if isinstance(error, TypeError):
        return f"{class_name(model)}.forward() missing" in str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = None if trace is None else trace.tb_frame.f_globals.get("__name__")
    return raised_in in {type(module).__module__ for module in model.modules() if hasattr(module, "base_model_prefix")}
