"""Images and videos shared over the sequence-parallel ranks of their sequences.

Each rank computes a contiguous part of them, balanced by patches, and all ranks get all features. The frames of a video
may be on several ranks where the encoder computes each on its own. The inputs must give the number of features of each
image before they are computed: patches with a grid and as many features for each patch of any image, or images of one
size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from opslot.distributed import gather_outputs, get_parallel_state
from opslot.models._multimodal.images import Size, visual_inputs
from opslot.models._multimodal.probe import Probe, find_once

# Outputs of an encoder that the language model does not read.
INTERNAL_STATES = ("last_hidden_state", "hidden_states", "attentions")
_IMAGE_DIMS = 4
# Relative to the largest feature, in float32: sums of other lengths are taken in another order.
_ROUNDING = 1e-5
# Frames, height and width of images and videos.
_SIZES = {
    "get_image_features": ((1, 1, 2), (1, 2, 2), (1, 3, 2)),
    "get_video_features": ((1, 1, 2), (1, 3, 2), (2, 1, 2)),
}


def pooled_features(outputs: Any) -> Any:
    """The `pooler_output` of a model output, or None.

    It may be an attribute that the class has no field for, as that of Pixtral's encoder up to Transformers 5.17.
    """
    return getattr(outputs, "pooler_output", None)


@dataclass(frozen=True)
class _Images:
    """The inputs of a method that computes features.

    Attributes:
        tensors: arguments with a first dim of patches or of images.
        rows: by argument, the rows of it that each image has.
        patches: of each image or video; 1 where all have the same size.
        grid: the argument with the frames, height and width of each image in patches; None for images of one size.
    """

    tensors: dict[str, Tensor]
    rows: dict[str, list[int]]
    patches: list[int]
    grid: str | None

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """The arguments of some of the images."""
        rows = self.rows.items()
        return {name: self.tensors[name][sum(count[:start]) : sum(count[:stop])] for name, count in rows}

    def frames(self) -> _Images:
        """The same with each frame of a video as an image."""
        if self.grid is None:
            return self
        grid = self.tensors[self.grid]
        counts = grid[:, 0]
        of_frame = torch.cat([torch.ones_like(counts)[:, None], grid[:, 1:]], 1)
        whole = {**self.tensors, self.grid: of_frame}
        is_per_image = {name: rows == [1] * len(self.patches) for name, rows in self.rows.items()}
        tensors = {
            name: value.repeat_interleave(counts.to(value.device), 0) if is_per_image[name] else value
            for name, value in whole.items()
        }
        patches = tensors[self.grid].prod(-1).tolist()
        rows = {name: [1] * len(patches) if is_per_image[name] else patches for name in tensors}
        return replace(self, tensors=tensors, rows=rows, patches=patches)


def can_share_images(holder: Any, method: str) -> bool:
    """Whether all outputs of `method` of `holder` are of images, with as many features for each patch of any image, and
    the same beside other images.

    HunYuan-VL has others at the ends of rows and images, and Ovis2 returns embeddings of tokens too. In MiniMax-M3
    images attend to each other up to Transformers 5.17.
    """

    def find() -> bool:
        probe = Probe(holder, method)
        shares = set()
        for size in _SIZES[method]:
            inputs = visual_inputs(probe.model, method, [size])
            images = _images(inputs) if inputs is not None else None
            if inputs is None or images is None:
                return False
            shares.add(Fraction(probe.features(inputs), sum(images.patches)))
        if len(shares) > 1 or 0 in shares:
            return False
        one, two = (_sizes(probe, [_SIZES[method][0]] * count) for count in (1, 2))
        if two != {name: 2 * size for name, size in one.items()}:
            return False
        drawn = _random_inputs(probe, [_SIZES[method][0]] * 2)
        if drawn is None:
            return False
        inputs, images = drawn
        parts = [_outputs(probe, {**inputs, **images.part(i, i + 1)}) for i in range(len(images.patches))]
        return _are_close(_outputs(probe, inputs), [torch.cat(part) for part in zip(*parts, strict=True)])

    return find_once(holder, f"images shared by {method}", find)


def _sizes(probe: Probe, images: Sequence[Size]) -> dict[str, int]:
    """Elements of each output that the language model may read."""
    with torch.no_grad():
        outputs = getattr(probe.model, probe.method)(**(visual_inputs(probe.model, probe.method, images) or {}))
    read = outputs if isinstance(outputs, Mapping) else {"": outputs}
    leaves = {name: pytree.tree_leaves(value) for name, value in read.items() if name not in INTERNAL_STATES}
    return {name: sum(x.numel() for x in own if isinstance(x, Tensor)) for name, own in leaves.items()}


def can_share_frames(holder: Any, method: str) -> bool:
    """Whether `method` of `holder` computes the same features of the frames of a video as of separate videos."""

    def find() -> bool:
        probe = Probe(holder, method)
        drawn = _random_inputs(probe, [(2, 1, 3)])
        if drawn is None or drawn[1].grid is None:
            return False
        inputs, images = drawn
        return _are_close(_outputs(probe, inputs), _outputs(probe, {**inputs, **images.frames().tensors}))

    return find_once(holder, f"frames shared by {method}", find)


def _random_inputs(probe: Probe, sizes: Sequence[Size]) -> tuple[dict[str, Any], _Images] | None:
    """Inputs with random pixels; None where the method does not take them."""
    inputs = visual_inputs(probe.model, probe.method, sizes)
    images = _images(inputs) if inputs is not None else None
    if inputs is None or images is None:
        return None
    generator = torch.Generator().manual_seed(0)
    pixels = {n: torch.randn(x.shape, generator=generator) for n, x in images.tensors.items() if x.is_floating_point()}
    return {**inputs, **pixels}, replace(images, tensors={**images.tensors, **pixels})


def _are_close(whole: Sequence[Tensor], apart: Sequence[Tensor]) -> bool:
    if not whole or [x.shape for x in whole] != [x.shape for x in apart]:
        return False
    return all((a - b).abs().max() <= _ROUNDING * a.abs().max() for a, b in zip(whole, apart, strict=True))


def _outputs(probe: Probe, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Each output that the language model may read, of all images; empty where the encoder raises an error."""
    try:
        with torch.no_grad():
            outputs = getattr(probe.model, probe.method)(**inputs)
    # A model's own code may raise anything.
    except Exception:
        return []
    # Llama 4 has no other output than the last hidden state.
    found = [*_read(outputs), *_read(pooled_features(outputs))]
    return found or _read(getattr(outputs, "last_hidden_state", None))


def _read(outputs: Any) -> list[Tensor]:
    """The tensors in outputs without internal states; those of a sequence, which has one for each image, are joined."""
    if isinstance(outputs, Mapping):
        return [x for name, value in outputs.items() if name not in INTERNAL_STATES for x in _of_layers(name, value)]
    parts = [x.flatten(0, -2) for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    return [torch.cat(parts)] if parts else []


def _of_layers(name: str, value: Any) -> list[Tensor]:
    """The tensors of an output. A sequence has one for each image in `pooler_output`, in others for each layer."""
    is_of_layers = name != "pooler_output" and isinstance(value, list | tuple)
    return [x for layer in value for x in _read(layer)] if is_of_layers else _read(value)


def share_images(
    method: Callable[..., Any],
    dummy: Callable[[], Mapping[str, Any] | None],
    given: Mapping[str, Any],
    rest: Mapping[str, Any],
    by_frame: bool = False,
) -> Any:
    """`method(**given, **rest)`, computed by the ranks together.

    Args:
        method: returns features of images or videos; the same call on all ranks of the sequences.
        dummy: makes the smallest arguments, for a rank that gets no image.
        given: arguments that the method names.
        rest: those that it passes on.
        by_frame: the frames of a video may be on several ranks.
    """
    group = get_parallel_state().sp_group
    # Precomputed inputs of the encoder, such as image_cu_seqlens, are of all images.
    precomputed = any(name.startswith(("image_", "video_")) for name in rest)
    images = _images(given) if group is not None and not precomputed else None
    if group is None or images is None:
        return method(**given, **rest)
    parts = images.frames() if by_frame else images
    bounds = _bounds(parts.patches, group.size())
    start, stop = bounds[group.rank()], bounds[group.rank() + 1]
    if start == stop:
        used: dict[str, Any] = dict(dummy() or {})
        smallest = _images(used)
        assert smallest is not None, "the smallest inputs have the same form"
        computed = sum(smallest.patches)
    else:
        used = parts.part(start, stop)
        computed = sum(parts.patches[start:stop])
    outputs = method(**{**given, **used}, **rest)
    counts = [sum(parts.patches[a:b]) for a, b in pairwise(bounds)]
    return _Gathering(group, images.patches, counts, computed, start == stop).outputs(outputs)


def _images(arguments: Mapping[str, Any]) -> _Images | None:
    """The images in the arguments of a method; None where the numbers of their features do not follow from them."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.dim()}
    grid = next((name for name in tensors if name.endswith("_grid_thw")), None)
    pixels = next((value for name, value in tensors.items() if name.startswith("pixel_values")), None)
    if pixels is None:
        return None
    if grid is not None:
        patches = tensors[grid].prod(-1).tolist()
    elif pixels.dim() == _IMAGE_DIMS and len(tensors) == 1:
        patches = [1] * len(pixels)
    else:
        return None
    rows = {name: _rows(value, patches) for name, value in tensors.items()}
    known = {name: value for name, value in rows.items() if value is not None}
    return _Images(tensors, known, patches, grid) if len(known) == len(rows) else None


def _rows(value: Tensor, patches: list[int]) -> list[int] | None:
    """How many rows of `value` each image has."""
    if len(value) == len(patches):
        return [1] * len(patches)
    return patches if len(value) == sum(patches) else None


def _bounds(patches: Sequence[int], ranks: int) -> list[int]:
    """Where each rank's images start, and their end: contiguous parts with about the same number of patches."""
    ends = list(accumulate(patches, initial=0))
    found = [0]
    for rank in range(1, ranks):
        wanted = ends[-1] * rank / ranks
        nearest = min(range(len(ends)), key=lambda number: abs(ends[number] - wanted))
        found.append(max(found[-1], nearest))
    return [*found, len(patches)]


@dataclass(frozen=True)
class _Gathering:
    """Joins the features that the ranks computed.

    Attributes:
        patches: of all images.
        counts: patches of each rank.
        computed: patches that this rank computed.
        is_dummy: they are of no image.
    """

    group: ProcessGroup
    patches: list[int]
    counts: list[int]
    computed: int
    is_dummy: bool

    def outputs(self, outputs: Any) -> Any:
        """The method's outputs with the features of all images, and without the states that only this rank has."""
        if not isinstance(outputs, Mapping):
            return self._of_images(outputs)
        found: Any = outputs
        pooled = pooled_features(outputs)
        if pooled is not None:
            found.pooler_output = self._of_images(pooled)
        for name, value in list(outputs.items()):
            if name == "pooler_output":
                continue
            if name == "last_hidden_state" and pooled is None:
                found[name] = self._of_images(value)
            elif name in INTERNAL_STATES:
                found[name] = None
            elif isinstance(value, list | tuple):
                # One tensor for each layer.
                found[name] = type(value)(self._of_images(layer) for layer in value)
            elif isinstance(value, Tensor):
                found[name] = self._joined(value)
        return found

    def _of_images(self, value: Any) -> Any:
        """A tensor of all images, or a list with one for each."""
        if isinstance(value, Tensor):
            return self._joined(value)
        own = list(value)
        nested = own[0].dim() - 1
        joined = self._joined(torch.cat([x.flatten(0, nested - 1) if nested > 1 else x for x in own]))
        share = Fraction(len(joined), sum(self.patches))
        sizes = [int(share * count) for count in self.patches]
        parts = joined.split(sizes)
        return type(value)(part.unflatten(0, (-1, *own[0].shape[1:nested])) if nested > 1 else part for part in parts)

    def _joined(self, own: Tensor) -> Tensor:
        """Features [rows of all images, ...] from those of this rank."""
        share = Fraction(len(own), self.computed)
        counts = [int(share * count) for count in self.counts]
        rows = own[:0] if self.is_dummy else own
        padding = own.new_zeros(max(counts) - len(rows), *own.shape[1:])
        parts = gather_outputs(torch.cat([rows, padding]), 0, self.group).chunk(len(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
