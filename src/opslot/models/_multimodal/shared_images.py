"""Images and videos shared over the sequence-parallel ranks of their sequences.

Each rank computes a contiguous part of them, balanced by patches, and all ranks get all features. The frames of a video
may be on several ranks where the encoder computes each on its own. Where the number of features of each image does not
follow from the inputs, the ranks exchange it, for which the host waits.
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

from opslot.distributed import gather_objects, gather_outputs, get_parallel_state
from opslot.models._multimodal.images import Size, visual_inputs
from opslot.models._multimodal.probe import Probe, find_once, pooled_features

# Outputs of an encoder that the language model does not read.
INTERNAL_STATES = ("last_hidden_state", "hidden_states", "attentions")
_PIXELS = ("pixel_values", "flattened_patches")
_IMAGE_DIMS = 4
# Relative to the largest feature, in float32: sums of other lengths are taken in another order.
_ROUNDING = 1e-5
# Frames, height and width of images and videos.
_SIZES = {
    "get_image_features": ((1, 1, 2), (1, 2, 2), (1, 3, 2)),
    "get_video_features": ((1, 1, 2), (1, 3, 2), (2, 1, 2)),
}


@dataclass(frozen=True)
class Sharing:
    """How ranks share the images or videos of a method.

    Attributes:
        by_frame: the frames of a video may be on several ranks.
        is_known: the number of features of each image follows from the inputs.
    """

    by_frame: bool
    is_known: bool


@dataclass(frozen=True)
class _Images:
    """The inputs of a method that computes features.

    Attributes:
        tensors: arguments with a first dim of patches, frames or images.
        rows: by argument, the rows of it that each image has.
        patches: of each image or video, or another measure of its size.
        counts: the argument with the frames of each video, alone or before their height and width; None without.
        has_proportional_features: features may be in proportion to `patches`.
    """

    tensors: dict[str, Tensor]
    rows: dict[str, list[int]]
    patches: list[int]
    counts: str | None
    has_proportional_features: bool

    @property
    def outer_dims(self) -> torch.Size:
        """Those of images [samples, images, channels, height, width], videos [videos, frames, ...] and patches with
        positions in both; else none.

        Crops of images have others beside them, such as `image_sizes`.
        """
        pixels = next(value for name, value in self.tensors.items() if name.startswith(_PIXELS))
        is_nested = pixels.dim() > _IMAGE_DIMS or (pixels.dim() == _IMAGE_DIMS and len(self.tensors) > 1)
        dims = pixels.shape[:2] if is_nested else torch.Size()
        return dims if all(x.shape[:2] == dims for x in self.tensors.values()) else torch.Size()

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """The arguments of some of the images."""
        rows = self.rows.items()
        return {name: self.tensors[name][sum(count[:start]) : sum(count[:stop])] for name, count in rows}

    def frames(self) -> tuple[_Images, list[int]]:
        """The same with each frame of a video, or image of a sample, by itself, and how many each one had."""
        tensors = self.tensors
        if self.counts is not None:
            given = tensors[self.counts]
            counts = given if given.dim() == 1 else given[:, 0]
            ones = torch.ones_like(counts)
            of_frame = ones if given.dim() == 1 else torch.cat([ones[:, None], given[:, 1:]], 1)
            tensors = {**tensors, self.counts: of_frame}
            tensors = {
                name: value.repeat_interleave(counts.to(value.device), 0) if len(value) == len(counts) else value
                for name, value in tensors.items()
            }
            numbers = counts.tolist()
        elif self.outer_dims[:1] == (1,):
            # Samples may be padded with images of zeros, so several are not divided.
            tensors = {name: x.transpose(0, 1) for name, x in tensors.items()}
            numbers = [self.outer_dims[1]]
        else:
            return self, [1] * len(self.patches)
        found = _images(tensors)
        assert found is not None, "the frames have the form of the videos"
        return found, numbers


def sharing_of(holder: Any, method: str) -> Sharing | None:
    """How ranks share the inputs of `method` of `holder`; None where they cannot.

    All outputs must be of images, and the same beside other images: Ovis2 also returns embeddings of tokens, and in
    MiniMax-M3 images attend to each other up to Transformers 5.17.
    """

    def find() -> Sharing | None:
        probe = Probe(holder, method)
        sizes = _SIZES[method]
        shares = set()
        for size in sizes:
            inputs = visual_inputs(probe.model, method, [size])
            images = _images(inputs) if inputs is not None else None
            if inputs is None or images is None:
                return None
            shares.add(Fraction(probe.features(inputs), sum(images.patches)))
        drawn = _random_inputs(probe, sizes[:2])
        if drawn is None or 0 in shares:
            return None
        inputs, images = drawn
        parts = [_outputs(probe, {**inputs, **images.part(i, i + 1)}) for i in range(len(images.patches))]
        if not _are_close(_outputs(probe, inputs), _concatenated(parts)):
            return None
        # HunYuan-VL has other features at the ends of rows and images.
        is_known = images.has_proportional_features and len(shares) == 1
        return Sharing(_shares_frames(probe), is_known)

    return find_once(holder, f"images shared by {method}", find)


def _shares_frames(probe: Probe) -> bool:
    """Whether a method computes the same features of the frames of a video, or images of a sample, by themselves."""
    is_video = probe.method == "get_video_features"
    drawn = _random_inputs(probe, [(2, 1, 3)] if is_video else [(1, 1, 3)] * 2)
    if drawn is None:
        return False
    inputs, images = drawn
    if not is_video and images.outer_dims:
        joined = _images({name: x.transpose(0, 1) for name, x in images.tensors.items()})
        assert joined is not None, "several images of a sample have the form of several samples"
        images = joined
    frames, numbers = images.frames()
    if sum(numbers) == len(numbers):
        return False
    return _are_close(_outputs(probe, {**inputs, **images.tensors}), _outputs(probe, {**inputs, **frames.tensors}))


def _random_inputs(probe: Probe, sizes: Sequence[Size]) -> tuple[dict[str, Any], _Images] | None:
    """Inputs with random pixels; None where the method does not take them."""
    inputs = visual_inputs(probe.model, probe.method, sizes)
    images = _images(inputs) if inputs is not None else None
    if inputs is None or images is None:
        return None
    generator = torch.Generator().manual_seed(0)
    pixels = {n: torch.randn(x.shape, generator=generator) for n, x in images.tensors.items() if x.is_floating_point()}
    return {**inputs, **pixels}, replace(images, tensors={**images.tensors, **pixels})


def _concatenated(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each output of several calls along its first dim; empty where that is not possible."""
    outputs = [[x[number] for x in parts] for number in range(min(map(len, parts)))]
    fit = all(len(x) == len(parts[0]) for x in parts) and all(len({x.shape[1:] for x in own}) == 1 for own in outputs)
    return [torch.cat(own) for own in outputs] if fit else []


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
    if isinstance(outputs, Tensor):
        # Ranks join the first dim, which is of all images in HunYuan-VL up to Transformers 5.17.
        return [outputs]
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
    sharing: Sharing,
) -> Any:
    """`method(**given, **rest)`, computed by the ranks together.

    Args:
        method: returns features of images or videos; the same call on all ranks of the sequences.
        dummy: makes the smallest arguments, for a rank that gets no image.
        given: arguments that the method names.
        rest: those that it passes on.
    """
    group = get_parallel_state().sp_group
    # Precomputed inputs of the encoder, such as image_cu_seqlens, are of all images.
    precomputed = any(name.startswith(("image_", "video_")) for name in rest)
    images = _images(given) if group is not None and not precomputed else None
    if group is None or images is None:
        return method(**given, **rest)
    parts, numbers = images.frames() if sharing.by_frame else (images, [1] * len(images.patches))
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
    patches = parts.patches if sharing.is_known else None
    return _Gathering(group, bounds, numbers, patches, computed).outputs(outputs)


def _images(arguments: Mapping[str, Any]) -> _Images | None:
    """The images in the arguments of a method; None where the rows of each are unknown."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.dim()}
    pixels = next((value for name, value in tensors.items() if name.startswith(_PIXELS)), None)
    if pixels is None:
        return None
    grid = next((name for name in tensors if name.endswith(("_grid_thw", "_grid_hw"))), None)
    counts = next((name for name in tensors if name.startswith("num_frames_per_")), None)
    if grid is not None:
        patches = tensors[grid].prod(-1).tolist()
        counts = grid if grid.endswith("_thw") else None
    elif counts is not None:
        patches = tensors[counts].tolist()
    elif "image_sizes" in tensors:
        patches = tensors["image_sizes"].prod(-1).tolist()
    else:
        patches = [1] * len(pixels)
    rows = {name: _rows(value, patches) for name, value in tensors.items()}
    known = {name: value for name, value in rows.items() if value is not None}
    is_proportional = grid is not None or (pixels.dim() == _IMAGE_DIMS and len(tensors) == 1)
    return _Images(tensors, known, patches, counts, is_proportional) if len(known) == len(rows) else None


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
        bounds: where each rank's parts start, and their end; a part is an image, a video or a frame.
        numbers: parts of each image or video.
        patches: of each part, in proportion to its features; None where the ranks exchange the numbers of features.
        computed: patches that this rank computed.
    """

    group: ProcessGroup
    bounds: list[int]
    numbers: list[int]
    patches: list[int] | None
    computed: int

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
                found[name] = self._of_images(value)
        return found

    def _of_images(self, value: Any) -> Any:
        """A tensor of all images, or a list with one for each."""
        if isinstance(value, Tensor):
            return self._joined(value, self._sizes(len(value)))
        own = list(value)
        nested = own[0].dim() - 1
        flat = [x.flatten(0, nested - 1) for x in own]
        sizes = self._sizes(sum(map(len, flat)), [len(x) for x in flat])
        joined = self._joined(torch.cat(flat), sizes)
        ends = list(accumulate(self.numbers, initial=0))
        parts = joined.split([sum(sizes[start:stop]) for start, stop in pairwise(ends)])
        return type(value)(part.unflatten(0, (-1, *own[0].shape[1:nested])) if nested > 1 else part for part in parts)

    def _sizes(self, total: int, own: list[int] | None = None) -> list[int]:
        """Rows of features of each part, from the total of this rank and, of outputs in a list, those of its parts.

        Exchanged totals are given to the first part of each rank.
        """
        if self.patches is not None:
            share = Fraction(total, self.computed)
            return [int(share * count) for count in self.patches]
        start, stop = self.bounds[self.group.rank() :][:2]
        mine = own or [total, *[0] * (stop - start - 1)]
        # The parts of a rank without any are dummies.
        return [size for sizes in gather_objects(mine[: stop - start], self.group) for size in sizes]

    def _joined(self, own: Tensor, sizes: list[int]) -> Tensor:
        """Features [rows of all images, ...] from those of this rank."""
        counts = [sum(sizes[start:stop]) for start, stop in pairwise(self.bounds)]
        # That of a rank without a part is a dummy.
        rows = own[: counts[self.group.rank()]]
        padding = own.new_zeros(max(counts) - len(rows), *own.shape[1:])
        parts = gather_outputs(torch.cat([rows, padding]), 0, self.group).chunk(len(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
