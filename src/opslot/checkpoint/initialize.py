"""Memory and initial values of a model's tensors: these depend on seed, module and index, not on sharding."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opslot._base.errors import CheckpointError, list_problems
from opslot._base.source import method_parameters
from opslot.checkpoint.model_tensors import clean_fqn
from opslot.checkpoint.tensor_slice import extent, intersect, local_ranges, relative
from opslot.distributed.dtensors import local_tensor
from opslot.slots.binding import original_class

_aten = torch.ops.aten
# Draws that fill a tensor in place, element by element.
_FILLING = {_aten.normal_.default, _aten.uniform_.default}
# Ops of initialization that work shard by shard, beside pointwise ops.
_PARTWISE = {
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.copy_.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.detach.default,
}
# What layers of torch make parameters with. Other factory functions also compute values, such as frequencies of RoPE.
_OF_PARAMETERS = {torch.empty, torch.rand, torch.randn}
# Numbers drawn from one seed. A rank draws every block that its shard overlaps: large blocks waste numbers at the
# boundaries of a shard, small ones cost launches.
_BLOCK = 1 << 20
# Of stacked experts; weights with more are kernels of convolutions.
_LARGEST_DIMS = 3


def materialize(model: nn.Module, device: torch.device | str | None, skip: Collection[int] = ()) -> None:
    """Allocate every meta tensor of `model` on `device`; values are undefined.

    Args:
        model: changed in place; tied parameters stay tied, sharded ones sharded.
        device: None for the CPU, or the mesh's device for a DTensor.
        skip: ids of parameters that stay on meta.
    """
    tied: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                tied[id(parameter)].append((module, key))

    def give_memory(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or id(tensor) in skip:
            return tensor
        home = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
        return torch.empty_like(tensor, device=device or home)

    # FSDP overrides it to follow its parameters.
    model._apply(give_memory)
    for places in tied.values():
        owner, owner_key = places[0]
        for module, key in places[1:]:
            module._parameters[key] = owner._parameters[owner_key]


def initialize_weights(model: nn.Module, seed: int | None = None, *, device: torch.device | str | None = None) -> None:
    """Initialize all of `model`, as Transformers' `_init_weights` does.

    The values depend on the seed, on names and shapes, and on the kind of device that draws them, not on how the model
    is sharded: any mesh starts from the same model. A rank draws and holds only its shards, those of tied parameters
    twice for a moment, and blocks of a million numbers; of a parameter whose initialization is more than elementwise
    (an embedding with a padding row, trunc_normal_'s rejections), the whole for a moment. torch's generators stay as
    they are.

    Args:
        model: on any device or on meta, then it receives memory; sharded (DTensor) or not, tied or not.
        seed: default torch's initial seed.
        device: where meta tensors get memory; None is the CPU, or a DTensor's mesh device.

    Raises:
        CheckpointError: tensors that the model cannot initialize by itself.
    """
    meta_buffers = [clean_fqn(name) for name, buffer in model.named_buffers() if buffer.is_meta]
    materialize(model, device)
    parameters = [clean_fqn(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    # A model's function may also set what modules below hold, e.g. scaled projections, so every module has its turn.
    initialize(model, parameters, meta_buffers, seed, every_module=True)


def initialize(
    model: nn.Module,
    names: Collection[str],
    meta_buffers: Collection[str],
    seed: int | None = None,
    *,
    every_module: bool = False,
) -> None:
    """Initialize `names`, which are not in the checkpoint, and `meta_buffers`, which had no memory.

    Uses the `_init_weights(module)` of the nearest model around a module, else the module's `reset_parameters`; only on
    modules that own such tensors and, where some are left, on modules around those, unless `every_module`. What
    `_init_weights` leaves, `reset_parameters` sets, or it has the values of the model's constructors. Other tensors of
    the same modules may change: call it before weights are written.

    Raises:
        CheckpointError: tensors that nothing sets.
    """
    wanted = {*names, *meta_buffers}
    if not wanted:
        return
    places = list(_places(model))
    owners = [place for place in places if wanted.intersection(place.tensors)]
    devices = {tensor.device for place in owners for tensor in place.tensors.values() if tensor.device.type == "cuda"}
    draws = MeshFreeDraws(torch.initial_seed() if seed is None else seed)
    with torch.no_grad(), torch.random.fork_rng(sorted(devices, key=str)), _untied(places):
        for place in owners:
            for name in wanted.intersection(place.tensors):
                _spoil(place.tensors[name])
        for place in places if every_module else owners:
            draws.run(place.path, place.module, place.init)
        left = _left(owners, wanted)
        if left and not every_module:
            # A model's function may set what modules below hold, as Falcon-H1's does.
            for place in places:
                prefix = f"{place.path}." if place.path else ""
                if not wanted.intersection(place.tensors) and any(name.startswith(prefix) for name in left):
                    draws.run(place.path, place.module, place.init)
            left = _left(owners, left)
        # Layers of torch that a model's function does not know, such as those of timm's encoders.
        for place in [place for place in owners if left.intersection(place.tensors)]:
            own = {name: local_tensor(tensor) for name, tensor in place.tensors.items() if name not in left}
            values = {name: tensor.clone() for name, tensor in own.items()}
            draws.run(place.path, place.module, None)
            for name, tensor in own.items():
                tensor.copy_(values[name])
        if left := _left(owners, left):
            torch.manual_seed(draws.seed)
            values = _constructor_values(model, left)
            for tensors in (place.tensors for place in owners):
                for name in values.keys() & tensors.keys():
                    local_tensor(tensors[name]).copy_(values[name][local_ranges(tensors[name])])
            left = _left(owners, left)
    if left:
        raise CheckpointError(
            list_problems(
                f"tensors that the checkpoint lacks and the model cannot initialize by itself ({len(left)})",
                sorted(left),
            ),
            hint="build the model on a real device, or give its modules a reset_parameters method",
        )


class _Place(NamedTuple):
    """A module, the function of the nearest model that initializes it, and its own tensors by their FQNs."""

    path: str
    module: nn.Module
    init: Callable[[nn.Module], Any] | None
    tensors: dict[str, Tensor]


@contextmanager
def _untied(places: Iterable[_Place]) -> Iterator[None]:
    """Context in which tied parameters but the first have memory of their own: Transformers ties them after drawing."""
    tied: list[tuple[nn.Module, str, nn.Parameter]] = []
    seen: set[int] = set()
    # A module that several others hold has one place for each.
    for module in dict.fromkeys(place.module for place in places):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                tied.append((module, key, parameter))
                module._parameters[key] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            seen.add(id(parameter))
    try:
        yield
    finally:
        for module, key, parameter in tied:
            module._parameters[key] = parameter


def _left(owners: Iterable[_Place], wanted: Collection[str]) -> set[str]:
    """Names of `wanted` that have no values yet."""
    named = itertools.chain.from_iterable(place.tensors.items() for place in owners)
    return {name for name, tensor in named if name in wanted and _is_spoiled(tensor)}


class ParametersOnMeta(TorchFunctionMode):
    """Inside, constructors make parameters that are drawn later on meta, and tensors that they compute on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_PARAMETERS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _constructor_values(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Those of the parameters and buffers `names` that the constructors of a Transformers model compute, on the CPU.

    The model is constructed again. A constructor may compute what `_init_weights` leaves alone, such as the parameters
    of xIELU.
    """
    make = getattr(original_class(model), "_from_config", None)
    config = getattr(model, "config", None)
    if make is None or config is None:
        return {}
    from transformers.initialization import no_init_weights

    with ParametersOnMeta(), no_init_weights():
        again: nn.Module = make(copy.deepcopy(config), attn_implementation="eager")
    values = {**dict(again.named_parameters(remove_duplicate=False)), **dict(again.named_buffers())}
    return {name: value.detach() for name, value in values.items() if name in names and not value.is_meta}


class _NeedsWhole(Exception):
    """Initialization does something to a DTensor that its parts cannot do alone."""


class MeshFreeDraws(TorchDispatchMode):
    """Inside, a random fill of a tensor draws block by block, and only the blocks that overlap the tensor's local part.

    Each block, and any other random op, has a seed that depends on the module and on the order of its ops.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._place = ""
        self._count = 0

    def run(self, path: str, module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
        """Initialize `module`; where its own DTensors are in the way, as whole tensors of which it keeps its shards."""
        try:
            self._run(path, module, init)
        except _NeedsWhole:
            own: dict[str, Any] = {key: p for key, p in module._parameters.items() if isinstance(p, DTensor)}
            wholes = {key: _whole(part) for key, part in own.items()}
            module._parameters.update(wholes)
            try:
                self._run(path, module, init)
            except _NeedsWhole as error:
                raise CheckpointError(
                    f"{path or type(module).__name__} cannot be initialized sharded: {error}",
                    hint="initialize the model on one process, save its weights, and load them",
                ) from None
            finally:
                module._parameters.update(own)
            for key, part in own.items():
                local_tensor(part).copy_(wholes[key][local_ranges(part)])

    def _run(self, path: str, module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
        self._place, self._count = path, 0
        with self:
            if init is not None:
                init(module)
            elif (reset := getattr(module, "reset_parameters", None)) is not None:
                reset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sharded = any(isinstance(value, DTensor) for value in (*args, *kwargs.values()))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._count += 1
            if func in _FILLING:
                self._fill(args[0], func, args[1:], kwargs)
                return args[0]
            torch.manual_seed(self._derive())
        if (sharded and not (func in _PARTWISE or torch.Tag.pointwise in func.tags)) or _is_mixed(sharded, args):
            raise _NeedsWhole(f"{func} on a DTensor")
        return func(*args, **kwargs)

    def _fill(self, tensor: Tensor, func: Any, arguments: Sequence[Any], kwargs: dict[str, Any]) -> None:
        region, local, shape = local_ranges(tensor), local_tensor(tensor), tuple(tensor.shape)
        if local.numel() == 0:
            return
        if len(shape) > _LARGEST_DIMS:
            # Kernels of convolutions, which may have a single element each, as rows.
            if local.shape[1:] != tensor.shape[1:]:
                raise _NeedsWhole(f"{func} on a convolution that is sharded along its input channels")
            width = math.prod(shape[1:])
            region, local, shape = (region[0], slice(0, width)), local.view(-1, width), (shape[0], width)
        while len(shape) < 2:
            region, local, shape = (*region, slice(0, 1)), local.unsqueeze(-1), (*shape, 1)
        generator = torch.Generator(local.device)
        height, width = shape[-2:]
        rows = max(1, _BLOCK // width)
        leading = region[:-2]
        for index in itertools.product(*(range(r.start, r.stop) for r in leading)):
            matrix = local[tuple(i - r.start for i, r in zip(index, leading, strict=True))]
            for block in range(region[-2].start // rows, -(-region[-2].stop // rows)):
                there = (slice(block * rows, min(height, (block + 1) * rows)), slice(0, width))
                overlap = intersect(region[-2:], there)
                assert overlap is not None
                destination = matrix[relative(overlap, region[-2:])]
                generator.manual_seed(self._derive(*index, block))
                drawn = torch.empty(extent(there), dtype=local.dtype, device=local.device)
                func(drawn, *arguments, **{**kwargs, "generator": generator})
                destination.copy_(drawn[relative(overlap, there)])

    def _derive(self, *place: int) -> int:
        text = repr((self.seed, self._place, self._count, place))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _is_mixed(sharded: bool, args: Sequence[Any]) -> bool:
    """Whether a DTensor meets a plain tensor that is not a scalar."""
    return sharded and any(isinstance(a, Tensor) and not isinstance(a, DTensor) and a.ndim for a in args)


def _whole(parameter: DTensor) -> nn.Parameter:
    """Memory for all of a sharded parameter, on this rank."""
    local = local_tensor(parameter)
    whole = nn.Parameter(
        torch.empty(parameter.shape, dtype=local.dtype, device=local.device), requires_grad=parameter.requires_grad
    )
    _spoil(whole)
    return whole


def _places(model: nn.Module, path: str = "", init: Callable[[nn.Module], Any] | None = None) -> Iterator[_Place]:
    """Every module, those inside first."""
    own_init: Any = getattr(model, "_init_weights", None)
    # Modules of MiniCPM-V have a method of this name that takes no module.
    if own_init is not None and method_parameters(type(model), "_init_weights"):
        init = own_init
    for key, child in model.named_children():
        yield from _places(child, f"{path}.{key}" if path else key, init)
    own = {**model._parameters, **model._buffers}
    named = {clean_fqn(f"{path}.{key}" if path else key): t for key, t in own.items() if t is not None}
    yield _Place(clean_fqn(path), model, init, named)


def _marker(dtype: torch.dtype) -> float | int | None:
    """A value that no initialization gives; None when the dtype has no room for one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype is torch.bool else torch.iinfo(dtype).min


def _spoil(tensor: Tensor) -> None:
    marker = _marker(tensor.dtype)
    if marker is not None:
        local_tensor(tensor).fill_(marker)


def _is_spoiled(tensor: Tensor) -> bool:
    marker, local = _marker(tensor.dtype), local_tensor(tensor)
    if marker is None or tensor.dtype is torch.uint8:
        return False
    return bool((torch.isnan(local) if marker != marker else local == marker).any())
