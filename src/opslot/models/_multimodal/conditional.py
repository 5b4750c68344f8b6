"""Modules that a rank runs only where its batch has images or audio, and for which no dummy input is known.

FSDP's collectives for such a module would wait for the ranks that do not run it. Encoders are gathered with the root,
which all ranks run, and all parameters of the root get a gradient on every rank, zero where there is none. Layers of
the language model that attend to images are called on every rank, and without images they return their input.

A rank also skips experts that none of its tokens is routed to, where each expert is a module. FSDP reduces gradients
of a layer together, so that ranks without some of them would send fewer elements. These get zero gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from opslot._base.errors import ConfigError
from opslot._base.source import method_parameters
from opslot.ops._common.documents import CACHE_ARGUMENTS, has_cache
from opslot.slots.protocol import trained_model

# Arguments of any decoder and its layers.
_OF_TOKENS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", *CACHE_ARGUMENTS}
# Attribute of a model with lists of modules that a rank may skip.
_SKIPPED = "_skipped_modules"


def transformers_model(model: nn.Module) -> Any:
    """The outermost model of Transformers in `model`, which may be a wrapper; `model` itself where there is none."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def encoders_of(model: nn.Module) -> list[nn.Module]:
    """The models in `model` with another config than its language model, such as a vision encoder."""
    from transformers import PreTrainedModel

    whole = transformers_model(model)
    if not isinstance(whole, PreTrainedModel):
        return []
    own = {type(whole.config), type(whole.config.get_text_config())}
    return [m for m in whole.modules() if isinstance(m, PreTrainedModel) and type(m.config) not in own]


def add_zero_of_root(model: Any) -> None:
    """Add zero times the parameters in the FSDP group of the root to the embeddings of tokens.

    Then all ranks reduce the gradients of the same parameters, and run the backward of the same layers.

    Raises:
        ConfigError: the model has no embeddings of tokens.
    """
    inner = trained_model(transformers_model(model))
    embeddings = inner.get_input_embeddings()
    if embeddings is None:
        raise ConfigError(
            f"{type(inner).__name__} cannot train on several ranks: a rank without images or audio would not run its "
            "encoders, and it has no embeddings of tokens to which zero times their parameters can be added",
            hint="train it with one process",
        )
    inside: list[nn.Module] = [module for module in model.modules() if module is not model]
    grouped = {part for module in inside if isinstance(module, FSDPModule) for part in module.modules()}
    owners = [module for module in model.modules() if module not in grouped and module is not embeddings]

    def add_zero(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + _zero(owners, output) if torch.is_grad_enabled() else output

    embeddings.register_forward_hook(add_zero)


def run_conditional_layers(model: nn.Module) -> None:
    """Let decoders call the layers that they skip where they get no features, as layers that return their input.

    Such a layer requires an argument, e.g. cross_attention_states, that is optional for the decoder around it.
    """
    for decoder in model.modules():
        layers = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
        optional = {name for name, p in method_parameters(type(decoder)).items() if p.default is None} - _OF_TOKENS
        found: dict[nn.Module, set[str]] = {}
        for layer in (layer for stack in layers for layer in stack):
            required = {name for name, p in method_parameters(type(layer)).items() if p.default is p.empty}
            if isinstance(layer, FSDPModule) and required & optional:
                found[layer] = required & optional
        if found and any(isinstance(layer, FSDPModule) and layer not in found for s in layers for layer in s):
            model.__dict__.setdefault(_SKIPPED, []).append(ConditionalLayers(decoder, found))


def add_zero_of_skipped_modules(model: nn.Module) -> None:
    """Let each module of a list in a layer, such as an expert, get gradients on ranks that do not call it: zeros."""
    found = model.__dict__[_SKIPPED] = []
    for owner in model.modules():
        for stack in _stacks(owner):
            # PEFT's layers have a dictionary with one module for each adapter.
            parts = [part for part in stack if any(parameter.requires_grad for parameter in part.parameters())]
            # One with a group of its own inside is sharded when its owner ends.
            has_groups = any(isinstance(module, FSDPModule) for part in parts for module in part.modules())
            if len(parts) > 1 and not has_groups:
                found.append(SkippedModules(owner, parts))


def skipped_modules(model: nn.Module) -> list[SkippedModules | ConditionalLayers]:
    """What the functions above have found in a model; empty where they were not called."""
    return model.__dict__.get(_SKIPPED, [])


def _stacks(owner: nn.Module) -> Iterator[Iterable[nn.Module]]:
    """The lists and dictionaries of modules whose modules a module may call."""
    lists = (nn.ModuleList, nn.ModuleDict)
    calls_its_own = isinstance(owner, lists) and "forward" in vars(type(owner))
    for child in (owner, *owner.children()) if calls_its_own else owner.children():
        if isinstance(child, lists) and (child is owner or "forward" not in vars(type(child))):
            yield child.children()


class SkippedModules:
    """The modules of a list that a call of their owner has not called.

    Attributes:
        parts: the modules of the list.
        called: those that the current call of their owner has called.
        used: those called with gradients since the set was cleared; without those that compiled code calls.
    """

    def __init__(self, owner: nn.Module, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.called: set[nn.Module] = set()
        self.used: set[nn.Module] = set()
        owner.register_forward_pre_hook(self.begin)
        # Before FSDP frees the whole parameters.
        owner.register_forward_hook(self.end, prepend=True)
        for part in parts:
            part.register_forward_pre_hook(self.note)

    def begin(self, owner: nn.Module, args: Any) -> None:
        """Forward pre-hook of the owner."""
        if not torch.compiler.is_compiling():
            self.called.clear()

    def note(self, part: nn.Module, args: Any) -> None:
        """Forward pre-hook of a module of the list."""
        if not torch.compiler.is_compiling():
            self.called.add(part)

    def end(self, owner: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook of the owner."""
        if not torch.is_grad_enabled():
            return output
        # Compiled code does not know what it skips, and zeros change no gradient.
        parts = self.parts
        if not torch.compiler.is_compiling():
            self.used |= self.called
            parts = [part for part in parts if part not in self.called]
        skipped = [module for part in parts for module in part.modules()]
        leaves, spec = pytree.tree_flatten(output)
        at = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if not skipped or at is None:
            return output
        leaves[at] = leaves[at] + _zero(skipped, leaves[at])
        return pytree.tree_unflatten(leaves, spec)


class ConditionalLayers:
    """The layers of a decoder that it skips without features.

    Attributes:
        parts: the layers.
        used: those that ran with features and gradients since the set was cleared.
    """

    def __init__(self, decoder: nn.Module, layers: dict[nn.Module, set[str]]) -> None:
        self.parts = list(layers)
        self.used: set[nn.Module] = set()
        self.names = sorted(set().union(*layers.values()))
        # Until the next forward, for layers that are computed again in backward.
        self.skipped = False
        decoder.register_forward_pre_hook(self.begin, with_kwargs=True)
        for layer in layers:
            layer.forward = partial(self.run, layer, layer.forward)

    def begin(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the decoder."""
        missing = [name for name in self.names if kwargs.get(name) is None]
        self.skipped = bool(missing) and not has_cache(kwargs)
        if not self.skipped:
            return None
        device = next(decoder.parameters()).device
        return args, {**kwargs, **{name: torch.zeros((), device=device) for name in missing}}

    def run(
        self, layer: nn.Module, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a layer."""
        if self.skipped:
            return hidden_states + _zero(list(layer.modules()), hidden_states)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.used.add(layer)
        return forward(hidden_states, *args, **kwargs)


def _zero(owners: list[nn.Module], like: Tensor) -> Tensor:
    """Zero [] with zero gradients for the trained parameters of modules, without those of their children."""
    own = dict.fromkeys(p for module in owners for p in module.parameters(recurse=False) if p.requires_grad)
    return sum((p.flatten()[:0].sum() for p in own), torch.zeros((), device=like.device)).to(like.dtype)
