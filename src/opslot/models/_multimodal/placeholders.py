"""Placeholders of a sample against the features that its model will compute, by the model's own check.

The model runs on the meta device up to its language model, on integer inputs of the host, so the check costs no
computation and holds for any way to cut images.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opslot._base.source import forward_source
from opslot.models._multimodal.decoder import reader_in
from opslot.models._multimodal.host_inputs import keep_inputs_on_host
from opslot.models._multimodal.modalities import feature_module

if TYPE_CHECKING:
    from opslot.data.multimodal.rope_positions import RopePositions


class _ReachedLanguageModelError(Exception):
    """The features were placed."""


class PlaceholderCheck:
    """Runs a model's check of placeholders.

    Args:
        positions: has the model on the meta device.
    """

    def __init__(self, positions: RopePositions) -> None:
        self.positions = positions
        # By sizes and integers of the inputs, which are those of many samples.
        self._known: dict[Any, str | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"positions": self.positions, "_known": {}}

    def __call__(self, ids: Tensor, features: Mapping[str, Tensor]) -> str | None:
        """What is wrong with the tokens of samples; "" for nothing, None where the model cannot tell.

        Args:
            ids: [S] or [B, S].
            features: what the processor returned besides tokens.
        """
        special = torch.unique(ids, return_counts=True)
        key = (*(tuple(part.tolist()) for part in special), *(_key(*item) for item in sorted(features.items())))
        if key not in self._known:
            self._known[key] = self._run({"input_ids": torch.atleast_2d(ids), **features})
        return self._known[key]

    @cached_property
    def _model(self) -> Any:
        """The model with a hook before its language model; None where it has no method that computes features."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        model = self.positions.model
        holder = feature_module(model)
        if holder is None:
            return None
        reader = reader_in(holder)
        reader.register_forward_pre_hook(_stop)
        own = {*reader.modules()}
        for stack in (m for m in model.modules() if isinstance(m, nn.ModuleList) and m not in own):
            for layer in (layer for layer in stack if isinstance(layer, GradientCheckpointingLayer)):
                layer.forward = _returning_input(type(layer))
        return keep_inputs_on_host(model)

    def _run(self, inputs: Mapping[str, Tensor]) -> str | None:
        if self._model is None:
            return None
        try:
            with torch.no_grad():
                self._model(**inputs, use_cache=False)
        except _ReachedLanguageModelError:
            return ""
        except ValueError as error:
            text = str(error).splitlines()[0]
            return text if "token" in text and "feature" in text else None
        # The code of any model, which may read values that the meta device does not have.
        except Exception:
            return None
        return None


def _returning_input(cls: type) -> Callable[..., Any]:
    """A forward of an encoder's layer of class `cls` that returns its input: layers keep the number of features."""
    tree = ast.parse(forward_source(cls))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    is_tuple = any(
        isinstance(value, ast.Tuple) or (isinstance(value, ast.Name) and value.id == "outputs") for value in returned
    )
    return lambda hidden_states, *args, **kwargs: (hidden_states,) if is_tuple else hidden_states


def _stop(*_: Any) -> None:
    raise _ReachedLanguageModelError


def _key(name: str, value: Tensor) -> tuple[Any, ...]:
    return name, value.shape, () if value.is_floating_point() else tuple(value.flatten().tolist())
