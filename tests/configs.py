"""Faster validation of Transformers' configurations, which tests make thousands of."""

from __future__ import annotations

import importlib.util
from typing import Any


def validate_quickly() -> None:
    """Patch the validation of this process; the same values are valid.

    huggingface_hub tries the types of a union in order. For a nested configuration, whose field may also be a dict, it
    formats the whole configuration as JSON for an error that it drops.
    """
    if importlib.util.find_spec("huggingface_hub.dataclasses") is None:
        return
    from huggingface_hub import dataclasses

    validators = getattr(dataclasses, "_BASIC_TYPE_VALIDATORS", {})
    validate = getattr(dataclasses, "_validate_union", None)

    def validate_union(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
        # A bool is not a valid int.
        if not any(base in kinds for base in type(value).__mro__ if base is not int or type(value) is not bool):
            validate(name, value, kinds)

    for kind, validator in validators.items():
        if validator is validate:
            validators[kind] = validate_union
