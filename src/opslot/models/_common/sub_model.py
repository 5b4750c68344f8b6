"""A model that holds the model that trains: an omni model whose text model ("thinker") trains without its speech parts.

`train_sub_model` declares it in the architecture's patch. The generated class then builds the sub-model alone, and its
forward and text generation are the sub-model's. Everything else reads the declaration from the class
(`opslot.slots.protocol.sub_model`): loading skips the weights of the other parts, and export can copy them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opslot._base.errors import ConfigError
from opslot.patchgen import PatchConfig
from opslot.slots.protocol import SUB_MODEL, SubModel, sub_model

# Methods of a model that are the sub-model's.
_DELEGATED = (
    "get_input_embeddings",
    "set_input_embeddings",
    "get_output_embeddings",
    "set_output_embeddings",
    "get_decoder",
)


def train_sub_model(
    patch: PatchConfig, model: str, sub_class: str, declared: SubModel, *, built_by: str, classes: Iterable[str]
) -> None:
    """Let the generated class `model` build and train its sub-model alone.

    Args:
        sub_class: class of the sub-model.
        declared: the sub-model, and what is left out.
        built_by: method of the model that builds the other parts.
        classes: their classes, which are excluded from the generated module with what only they use.
    """
    parts = " and ".join(declared.excluded)
    patch.override_method(
        f"{model}.{built_by}",
        f"""
        def {built_by}(self):
            raise NotImplementedError("{parts} are not built for training; use Transformers' own {model}")
        """,
        description=f"{parts} are not built",
    )
    patch.exclude_from_output(*classes)
    patch.set_attribute(model, SUB_MODEL, declared._asdict())
    patch.add_final_block(f"from {__name__} import delegate\n\ndelegate({model}, {sub_class})")


def delegate(cls: Any, sub_class: Any) -> None:
    """Let the forward pass, text generation and embeddings of a class be those of its sub-model."""
    declared = sub_model(cls)
    assert declared is not None, "train_sub_model sets the attribute"
    name = declared.name
    cls.__init__ = _without_other_parts(cls.__init__, declared.settings)
    cls.forward = _forwarding(sub_class, "forward", name)
    for method in _DELEGATED:
        setattr(cls, method, _forwarding(sub_class, method, name))
    cls.generate = _generating_text(cls.generate, declared)


def _without_other_parts(init: Any, settings: Mapping[str, Any]) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config = copy.deepcopy(config)
        for name, value in settings.items():
            setattr(config, name, value)
        init(self, config, *args, **kwargs)

    return __init__


def _forwarding(sub_class: Any, method: str, name: str) -> Any:
    def forwarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = getattr(self, name)
        # Not its forward itself, so that its hooks run too.
        return (part if method == "forward" else getattr(part, method))(*args, **kwargs)

    # Transformers and others read which inputs a model takes.
    forwarded.__signature__ = inspect.signature(getattr(sub_class, method))  # type: ignore[attr-defined]
    forwarded.__name__ = forwarded.__qualname__ = method
    return forwarded


def _generating_text(generate: Any, declared: SubModel) -> Any:
    prefixes = tuple(f"{part}_" for part in declared.excluded)

    @functools.wraps(generate)
    def text_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(hasattr(self, part) for part in declared.excluded):
            return generate(self, *args, **kwargs)
        audio = [name for name in kwargs if name.startswith(prefixes)]
        mode, returned = kwargs.pop("generation_mode", None), kwargs.pop("return_audio", None)
        if mode not in (None, False, "text"):
            audio.append(f"generation_mode={mode!r}")
        if returned:
            audio.append("return_audio=True")
        if kwargs.pop("speaker", None) is not None:
            audio.append("speaker")
        if audio:
            raise ConfigError(
                f"{type(self).__name__} generates text only: {' and '.join(declared.excluded)} are not built",
                found=", ".join(audio),
                hint="export the model with its speech parts and generate audio with Transformers' own class",
            )
        own = f"{declared.name}_"
        part = getattr(self, declared.name)
        with _forward_through(self, part):
            return part.generate(*args, **{name.removeprefix(own): value for name, value in kwargs.items()})

    return text_generate


@contextlib.contextmanager
def _forward_through(model: Any, part: Any) -> Iterator[None]:
    """Inside, a forward pass of the sub-model is one of the model, whose hooks gather parameters or take copies."""
    own, is_inside = part.forward, False
    replaced = vars(part).get("forward")

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return own(*args, **kwargs)
        is_inside = True
        try:
            return model(*args, **kwargs)
        finally:
            is_inside = False

    part.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del part.forward
        else:
            part.forward = replaced
