"""What an encoder takes, found by running it: a small copy on the CPU, with random weights and no decoder layers.

Configs give sizes under different names, without the order of dims and without the lengths that are legal. Inputs
are tried, the smallest first, on the code that will run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from opslot.models._multimodal.decoder import decoder_in
from opslot.slots.protocol import derived_from

Inputs = dict[str, Tensor]

# A prime number, so that rows of a weight do not repeat those before them.
_SAMPLE = 1_048_573

_found: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class Probe:
    """A copy of the module that computes features. Layers of the same form share their weights, to be small.

    Args:
        holder: the module, also on the meta device or sharded.
        method: its method that computes features.
    """

    def __init__(self, holder: Any, method: str) -> None:
        self.model = meta_copy(holder)
        _materialize(self.model)
        # Of what is left, the buffers.
        self.model.initialize_weights()
        self.method = method

    def features(self, inputs: Mapping[str, Tensor]) -> int:
        """Number of features of some inputs; 0 where the encoder raises an error."""
        try:
            with torch.no_grad():
                return count_features(getattr(self.model, self.method)(**inputs))
        # A model's own code may raise anything.
        except Exception:
            return 0


def first_with_features(holder: Any, method: str, candidates: Callable[[nn.Module], Iterable[Inputs]]) -> Inputs | None:
    """The first inputs that give features, of `candidates` for the copy; None where there are none, or no copy."""
    try:
        probe = Probe(holder, method)
    # A model's own code may raise anything.
    except Exception:
        return None
    return next((inputs for inputs in candidates(probe.model) if probe.features(inputs)), None)


def find_once(holder: Any, method: str, find: Callable[[], Any]) -> Any:
    """What `find` returned for a module and its method when it was called for them first."""
    known = _found.setdefault(holder, {})
    if method not in known:
        known[method] = find()
    return known[method]


def pooled_features(outputs: Any) -> Any:
    """The `pooler_output` of a model output, or None.

    It may be an attribute that the class has no field for, as that of Pixtral's encoder up to Transformers 5.17.
    """
    return getattr(outputs, "pooler_output", None)


def count_features(outputs: Any) -> int:
    """Number of features in what a method such as `get_image_features` returns."""
    features = outputs
    if isinstance(outputs, Mapping):
        pooled = pooled_features(outputs)
        features = outputs.get("last_hidden_state") if pooled is None else pooled
        if features is None:
            # Pairs of a layer of the language model and what is added before it.
            _, features = outputs["deepstack_features"][0]
    while isinstance(features, tuple | list) and isinstance(features[0], tuple | list):
        features = features[0]
    parts = [features] if isinstance(features, Tensor) else features
    return sum(part.shape[:-1].numel() for part in parts)


@torch.no_grad()
def _materialize(model: nn.Module) -> None:
    """Move a model from the meta device to the CPU, with random parameters. What modules share stays shared.

    An encoder may have billions of parameters, so their values repeat those of one small sample.
    """
    generator = torch.Generator().manual_seed(0)
    sample = 0.02 * torch.randn(_SAMPLE, generator=generator)
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None:
                    tensors[name] = made[x] if x in made else made.setdefault(x, _materialized(x, name, sample))


def _materialized(x: Tensor, name: str, sample: Tensor) -> Tensor:
    empty = torch.empty_like(x, device="cpu")
    if not isinstance(x, nn.Parameter):
        return empty
    if x.is_floating_point():
        for part in empty.view(-1).split(len(sample)):
            part.copy_(sample[: len(part)])
        if x.dim() == 1 and name == "weight":
            # Those of norms.
            empty += 1
    parameter = nn.Parameter(empty, x.requires_grad)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def meta_copy(holder: Any) -> Any:
    """A copy of a module on the meta device, without decoder layers."""
    modules = ("transformers.models.", "opslot.generated.")
    found = (cls for cls in type(holder).__mro__ if cls.__module__.startswith(modules))
    cls: Any = next(found, derived_from(type(holder)) or type(holder))
    with torch.device("meta"):
        model = cls._from_config(copy.deepcopy(holder.config), attn_implementation="eager", dtype=torch.float32)
    text = decoder_in(model)
    decoder = set(text.modules())
    # Encoders are inside of some decoders (Phi-4 multimodal).
    for inner in decoder - {text}:
        if hasattr(inner, "_from_config") and type(inner.config) is not type(text.config):
            decoder = decoder - set(inner.modules())
    for module in list(model.modules()):
        if isinstance(module, nn.Embedding) and module in decoder:
            module.weight = nn.Parameter(module.weight[:1])
        for child in module.children():
            if isinstance(child, nn.ModuleList) and child in decoder:
                del child[:]
            elif isinstance(child, nn.ModuleList):
                _share_equal(child)
    return model.eval()


def _share_equal(layers: nn.ModuleList) -> None:
    """Let layers of the same class and sizes have the weights of the first of them."""
    known: dict[Any, nn.Module] = {}
    for layer in layers:
        sizes = tuple((name, p.shape) for name, p in layer.named_parameters())
        first = known.setdefault((type(layer), sizes), layer)
        for path, module in layer.named_modules() if first is not layer else ():
            module._parameters.update(first.get_submodule(path)._parameters)
