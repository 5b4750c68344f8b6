"""Towers that run on every rank: a rank without images, videos or audio runs them on the smallest legal input.

FSDP's collectives for the parameters of a tower need all ranks, so that a rank whose batch has no image would hang the
others. Each modality that a model can take is run once in each forward pass, in the order of Transformers' code. Towers
whose smallest input is unknown have no separate collectives (`conditional`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from opslot._base.boundaries import BOUNDARIES
from opslot._base.errors import ConfigError
from opslot._base.source import forward_source, method_parameters
from opslot.distributed import get_parallel_state
from opslot.distributed.dummy import dummy_forward
from opslot.models._hooks import add_pre_hook
from opslot.models._multimodal.audio import METHOD as AUDIO_METHOD
from opslot.models._multimodal.audio import AudioInputs
from opslot.models._multimodal.conditional import (
    add_zero_of_root,
    encoders_of,
    run_conditional_layers,
    transformers_model,
)
from opslot.models._multimodal.decoder import decoder_in, reader_in
from opslot.models._multimodal.images import visual_inputs
from opslot.models._multimodal.probe import pooled_features
from opslot.models._multimodal.sequence import has_whole_sequences
from opslot.models._multimodal.sharing import INTERNAL_STATES, Sharing, share, sharing_of
from opslot.slots.protocol import trained_model

# Methods that compute features of a modality.
_INPUTS = {"image": ("pixel_values", "flattened_patches"), "audio": ("input_features", "input_values")}
_METHODS = ("get_image_features", "get_video_features", AUDIO_METHOD)
# Attribute of a model with towers that every rank runs.
_TOWERS = "_towers"
# What `generate` calls to encode images and audio before the forward pass.
_ENCODES_BEFORE = "_prepare_multimodal_encoder_kwargs_for_generation"


@dataclass
class Towers:
    """How ranks without images, videos or audio take part in the collectives of a model's towers.

    Attributes:
        dummies: by method, what makes the smallest legal arguments of those that compute features.
        are_known: whether `dummies` has all methods; False also where the forward computes features without a method.
        with_root: the encoders where not `are_known`. Their parameters must be gathered with those of the root, so that
            running them needs no collective.
        used: the methods that this rank has called on an input with gradients since the set was cleared.
        parameters: the trained parameters of towers and projections; None until they are needed.
    """

    dummies: Mapping[str, Callable[[], dict[str, Any] | None]]
    are_known: bool = True
    with_root: Sequence[nn.Module] = ()
    used: set[str] = field(default_factory=set)
    parameters: list[nn.Parameter] | None = None

    def run_on_every_rank(self, model: nn.Module) -> None:
        """Let each forward pass of `model` run all its towers, and add zero times what no input was given for."""
        run_conditional_layers(model)
        if not self.are_known:
            add_zero_of_root(model)
        if self.dummies or not self.are_known:
            model.__dict__[_TOWERS] = self
        holder = feature_module(model)
        if holder is None or not self.dummies:
            return
        run = _Run(holder, self)
        for name in self.dummies:
            setattr(holder, name, partial(run.run, name))
        holder.register_forward_pre_hook(run.begin, with_kwargs=True)
        # Before FSDP gathers the parameters of the language model, as after real inputs.
        reader_in(holder).register_forward_pre_hook(run.end, with_kwargs=True, prepend=True)


def towers_of(model: nn.Module) -> Towers | None:
    """The towers that each rank runs; None where no rank runs them on dummy inputs."""
    return model.__dict__.get(_TOWERS)


def encode_in_forward(model: Any) -> None:
    """Let `generate` encode images and audio in the forward pass of a model that is sharded or computes with copies.

    That of Transformers 5.24 encodes them before it, where FSDP2 has not gathered the parameters, and models that
    compute with copies of them hold the parameters themselves.
    """
    from transformers import GenerationMixin

    part = trained_model(transformers_model(model))
    own = getattr(type(part), _ENCODES_BEFORE, None)
    if own is not None and own is getattr(GenerationMixin, _ENCODES_BEFORE, None):
        part.__dict__[_ENCODES_BEFORE] = _without_encoding


def _without_encoding(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    return model_kwargs


def alias_outputs(model: nn.Module) -> None:
    """Let a sharded model with encoders return other tensors than those that the loss is computed from.

    FSDP gathers parameters in backward when a gradient reaches an output. Features of images are an output too, on
    ranks with images alone, and a view of a tensor in some models.
    """
    if feature_module(model) is not None or inlined_inputs(model):
        model.register_forward_hook(_alias_outputs, prepend=True)


def find_towers(model: nn.Module) -> Towers:
    """The towers of a model that is not sharded yet; of a model without towers, none.

    Raises:
        ConfigError: features are read in layers of the language model alone.
    """
    holder = feature_module(model)
    if holder is None:
        given = method_parameters(type(transformers_model(model)))
        are_optional = any(given[name].default is not given[name].empty for name in inlined_inputs(model).values())
        return Towers({}, False, encoders_of(model)) if are_optional else Towers({})
    if decoder_in(holder) is holder:
        # No module between its layers and the features, before which the others could run (Chameleon).
        return Towers({}, False, encoders_of(model))
    source = forward_source(type(holder))
    if "deepstack_features" in source and "pooler_output" not in source:
        raise ConfigError(
            f"{type(holder).__name__} cannot train on several ranks: it reads features of images in its layers alone, "
            "and ranks without images would run the backward of the encoder in another order",
            hint="train it on one GPU",
        )
    called = sorted((source.index(f"self.{name}("), name) for name in _methods(holder) if f"self.{name}(" in source)
    found = {name: _smallest_input(holder, name) for _, name in called}
    dummies = {name: make for name, make in found.items() if make is not None}
    return Towers(dummies) if len(dummies) == len(found) else Towers(dummies, False, encoders_of(model))


def inlined_inputs(model: nn.Module) -> dict[str, str]:
    """By kind, the inputs of images or audio of a model whose forward has no method that computes their features."""
    return media_parameters(model) if feature_module(model) is None else {}


def media_parameters(model: nn.Module) -> dict[str, str]:
    """By kind, the first parameter of a model's forward that takes images or audio."""
    found: dict[str, str] = {}
    for name in method_parameters(type(transformers_model(model))):
        kind = next((kind for kind, names in _INPUTS.items() if name.endswith(names)), None)
        if kind is not None:
            found.setdefault(kind, name)
    return found


def _methods(holder: Any) -> list[str]:
    """The methods whose towers the config has."""
    configs = {"get_audio_features": "audio_config"}
    return [name for name in _METHODS if getattr(holder.config, configs.get(name, "vision_config"), True) is not None]


def _alias_outputs(model: nn.Module, args: Any, outputs: Any) -> Any:
    """Forward hook, before FSDP's."""
    return pytree.tree_map_only(Tensor, lambda x: _Alias.apply(x) if x.requires_grad else x, outputs)


class _Alias(torch.autograd.Function):
    """The same memory as another node of the graph, and not as a view, of which FSDP warns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def feature_module(model: nn.Module) -> Any:
    """The innermost module whose forward computes features of images, videos or audio, or None."""
    found = None
    for module in model.modules():
        if any(f"self.{name}(" in forward_source(type(module)) for name in _METHODS if hasattr(type(module), name)):
            found = module
    return found


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The language model of a model with towers; None for one without, and where it attends to an encoder's output."""
    holder = feature_module(model)
    whole = next((module.config for module in model.modules() if hasattr(module, "config")), None)
    attends_to_encoder = getattr(whole, "is_encoder_decoder", False)
    return None if holder is None or attends_to_encoder else decoder_in(holder)


def computes_features_inside(model: nn.Module) -> bool:
    """Whether no module is a language model alone, whose inputs are the features of images or audio."""
    holder = feature_module(model)
    return bool(inlined_inputs(model)) if holder is None else decoder_of(model) is holder


def keep_documents_from_towers(model: nn.Module) -> None:
    """Pass `cu_seq_lens_q` and the like only to the language model: they are not the sequences of towers.

    Transformers' models pass all keyword arguments to both, with `position_ids` among them where their forward does not
    name it (InstructBLIP's Q-Formers would take them as those of their own text).
    """
    holder = feature_module(model)
    if holder is None:
        return
    decoder = decoder_in(holder)
    names_positions = "position_ids" in method_parameters(type(holder))
    hook = _without_documents if names_positions else _without_positions
    for child in holder.children():
        if _takes_documents(child) and all(module is not decoder for module in child.modules()):
            add_pre_hook(child, hook, prepend=True)


def _takes_documents(module: nn.Module) -> bool:
    """An output head does not, and the fused loss needs one without hooks."""
    parameters = method_parameters(type(module)).values()
    return any(p.kind is p.VAR_KEYWORD or p.name in BOUNDARIES for p in parameters)


def _without_documents(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def _without_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return _without_documents(module, args, {name: value for name, value in kwargs.items() if name != "position_ids"})


class _Run:
    """The dummy inputs of a model's towers that one forward pass has not run yet."""

    def __init__(self, holder: Any, towers: Towers) -> None:
        self.holder = holder
        self.towers = towers
        self.dummies = towers.dummies
        self.pending: list[str] = []
        self.zeros: list[Tensor] = []
        self.computing = False
        # Of audio, and of images and videos: whether this forward pass has an input, and the norms whose statistics
        # dummy inputs must not change.
        self.encoded: set[bool] = set()
        self.kept: dict[bool, list[nn.Module]] = {False: [], True: []}
        state = get_parallel_state()
        # Of methods whose images, videos or audios sequence-parallel ranks share.
        self.shared: dict[str, Sharing] = {}
        for name in self.dummies if state.sp > 1 else ():
            if (sharing := sharing_of(holder, name)) is not None:
                self.shared[name] = sharing

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of the model."""
        self.pending = list(self.dummies)
        self.zeros = []
        self.encoded.clear()
        self._train_norms(False)
        self._train_norms(True)

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """In place of the method `name`: before it, the dummy inputs of modalities that come earlier."""
        if self.computing:
            return self._call(name, *args, **kwargs)
        if torch.is_grad_enabled():
            self.towers.used.add(name)
        if name in self.pending:
            # In the order of the model's forward.
            self._run_pending(self.pending[: self.pending.index(name)])
            self.pending.remove(name)
        self.encoded.add(name == AUDIO_METHOD)
        self._train_norms(name == AUDIO_METHOD)
        method = partial(self._call, name)
        if not has_whole_sequences() or name not in self.shared:
            return method(*args, **kwargs)
        names = method_parameters(type(self.holder), name)
        given = {**dict(zip(names, args, strict=False)), **{n: x for n, x in kwargs.items() if n in names}}
        rest = {n: x for n, x in kwargs.items() if n not in names}
        return share(method, self.dummies[name], given, rest, self.shared[name])

    def end(self, decoder: Any, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook of what reads the features: the others, and the zeros in its inputs."""
        self._run_pending(self.pending)
        zeros, self.zeros = self.zeros, []
        if not zeros:
            return None
        zero, embeds = torch.stack(zeros).sum(), kwargs.get("inputs_embeds")
        if embeds is None:
            # The language model embeds the tokens itself (Kosmos-2.5).
            _add_to_next_output(decoder.get_input_embeddings(), zero)
            return None
        return args, {**kwargs, "inputs_embeds": embeds + zero.to(embeds.dtype)}

    def _run_pending(self, names: list[str]) -> None:
        self.pending = [name for name in self.pending if name not in names]
        if not names:
            return
        self.zeros.append(_zero_of_projections(self.holder))
        for name in names:
            self.zeros.append(self._run_dummy(name))

    def _run_dummy(self, name: str) -> Tensor:
        norms = [m for m in self.holder.modules() if isinstance(m, _BatchNorm) and m.training]
        ran: list[nn.Module] = []
        hooks = [norm.register_forward_pre_hook(lambda norm, args: ran.append(norm)) for norm in norms]
        for norm in norms:
            norm.eval()
        zero = dummy_forward(partial(self._features, name), **(self.dummies[name]() or {}))
        for hook in hooks:
            hook.remove()
        of_audio = name == AUDIO_METHOD
        # Activation checkpointing runs the dummy input again in backward, and another input of the same encoder too.
        self.kept[of_audio] += [] if of_audio in self.encoded else ran
        for norm in norms:
            norm.train(norm not in self.kept[of_audio])
        return zero

    def _train_norms(self, of_audio: bool) -> None:
        for norm in self.kept[of_audio]:
            norm.train(self.holder.training)
        self.kept[of_audio] = []

    def _features(self, name: str, **inputs: Any) -> Any:
        # The backward of anything else, such as the layers of a tower after the one whose states are used, would run on
        # this rank alone.
        return features_of(self._call(name, **inputs))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # A method may call another one: that of videos often calls that of images.
        before, self.computing = self.computing, True
        try:
            return getattr(type(self.holder), name)(self.holder, *args, **kwargs)
        finally:
            self.computing = before


def _add_to_next_output(module: nn.Module, value: Tensor) -> None:
    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output + value.to(output.dtype)

    handle = module.register_forward_hook(add)


def _zero_of_projections(holder: Any) -> Tensor:
    """Zero, with zero gradients for the modules that the forward itself applies to features.

    They are in the FSDP group of the root, so that their parameters are whole here. An output head has its own.
    """
    decoder = decoder_in(holder)
    source = forward_source(type(holder))
    applied = [child for name, child in holder.named_children() if f"self.{name}(" in source]
    applied = [child for child in applied if not isinstance(child, FSDPModule)]
    found = [p for child in applied if decoder not in child.modules() for p in child.parameters() if p.requires_grad]
    return sum((p.flatten()[:0].sum() for p in found), torch.zeros((), device=next(holder.parameters()).device))


def features_of(outputs: Any) -> Any:
    """What the language model reads of what a method such as `get_image_features` returns."""
    if not isinstance(outputs, Mapping):
        return outputs
    read = {name: value for name, value in outputs.items() if name not in INTERNAL_STATES and value is not None}
    pooled = pooled_features(outputs)
    if pooled is not None:
        return {**read, "pooler_output": pooled}
    # Some have features for layers of the language model alone (Granite 4 Vision).
    return {**read, "last_hidden_state": outputs["last_hidden_state"]} if "last_hidden_state" in outputs else read


def _smallest_input(holder: Any, name: str) -> Callable[[], dict[str, Any] | None] | None:
    """A function that makes the arguments of method `name`, or None where they are unknown."""
    if name == AUDIO_METHOD:
        make = AudioInputs(holder).make
    else:
        make = partial(visual_inputs, holder, name)
    return make if make() is not None else None
