"""Images, videos and audio shared over the sequence-parallel ranks of their sequences.

Each rank computes a contiguous part of them, balanced by size, and all ranks get all features. The frames of a video
may be on several ranks where the encoder computes each on its own. Where the number of features of each item does not
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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from opslot.distributed import gather_objects, gather_outputs, get_parallel_state
from opslot.models._multimodal.audio import FEATURES as AUDIO_FEATURES
from opslot.models._multimodal.audio import METHOD as AUDIO_METHOD
from opslot.models._multimodal.audio import AudioInputs
from opslot.models._multimodal.images import Size, visual_inputs
from opslot.models._multimodal.probe import Probe, find_once, pooled_features

# Outputs of an encoder that the language model does not read; those of a second encoder have a prefix.
INTERNAL_STATES = ("last_hidden_state", "hidden_states", "attentions")
_FEATURES = ("pixel_values", "flattened_patches", *AUDIO_FEATURES)
_IMAGE_DIMS = 4
# Relative to the largest feature, in float32: sums of other lengths are taken in another order.
_ROUNDING = 1e-5
# Frames, height and width of images and videos, each with another share of ends of rows, of rows and of frames.
_SIZES = {
    "get_image_features": ((1, 1, 2), (1, 2, 3), (1, 3, 2)),
    "get_video_features": ((1, 1, 2), (1, 2, 3), (2, 1, 2)),
}


@dataclass(frozen=True)
class Sharing:
    """How ranks share the images, videos or audios that a method takes.

    Attributes:
        by_frame: the frames of a video, or the images of a sample, may be on several ranks.
        is_known: the number of features of each follows from the inputs.
    """

    by_frame: bool
    is_known: bool


@dataclass(frozen=True)
class _Items:
    """The inputs of a method that computes features.

    Attributes:
        tensors: arguments with a first dim of patches, frames or items: images, videos or audios.
        rows: by argument, the rows of it that each item has.
        sizes: of each item, in patches or another measure.
        counts: the argument with the frames of each video, alone or before their height and width; None without.
        has_proportional_features: features may be in proportion to `sizes`.
    """

    tensors: dict[str, Tensor]
    rows: dict[str, list[int]]
    sizes: list[int]
    counts: str | None
    has_proportional_features: bool

    @property
    def outer_dims(self) -> torch.Size:
        """Those of images [samples, images, channels, height, width], videos [videos, frames, ...] and patches with
        positions in both; else none.

        Crops of images have others beside them, such as `image_sizes`.
        """
        pixels = next(value for name, value in self.tensors.items() if name.startswith(_FEATURES))
        is_nested = pixels.dim() > _IMAGE_DIMS or (pixels.dim() == _IMAGE_DIMS and len(self.tensors) > 1)
        dims = pixels.shape[:2] if is_nested else torch.Size()
        return dims if all(x.shape[:2] == dims for x in self.tensors.values()) else torch.Size()

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """The arguments of some of the items."""
        rows = self.rows.items()
        return {name: self.tensors[name][sum(count[:start]) : sum(count[:stop])] for name, count in rows}

    def frames(self) -> tuple[_Items, list[int]]:
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
            return self, [1] * len(self.sizes)
        found = _items(tensors)
        assert found is not None, "the frames have the form of the videos"
        return found, numbers


def sharing_of(holder: Any, method: str) -> Sharing | None:
    """How ranks share what `method` of `holder` takes; None where they cannot.

    All outputs must be of items, and the same beside other items: Ovis2 also returns embeddings of tokens, and in
    MiniMax-M3 images attend to each other up to Transformers 5.17.
    """

    def find() -> Sharing | None:
        probe = Probe(holder, method)
        drawn = _random_audio(probe) if method == AUDIO_METHOD else _random_inputs(probe, _SIZES[method][:2])
        if drawn is None:
            return None
        inputs, items = drawn
        for module in probe.model.modules():
            # Its statistics in training are of all items.
            if isinstance(module, _BatchNorm):
                module.train()
        parts = [_outputs(probe, {**inputs, **items.part(i, i + 1)}) for i in range(len(items.sizes))]
        if not _are_close(_outputs(probe, inputs), _concatenated(parts)):
            return None
        return Sharing(_shares_frames(probe), items.has_proportional_features and _is_proportional(probe))

    return find_once(holder, f"items shared by {method}", find)


def _is_proportional(probe: Probe) -> bool:
    """Whether each patch of any image gives as many features. HunYuan-VL has more at the ends of rows and images."""
    shares = set()
    for size in _SIZES[probe.method]:
        inputs = visual_inputs(probe.model, probe.method, [size])
        items = _items(inputs) if inputs is not None else None
        if inputs is None or items is None:
            return False
        shares.add(Fraction(probe.features(inputs), sum(items.sizes)))
    return len(shares) == 1 and 0 not in shares


def _shares_frames(probe: Probe) -> bool:
    """Whether a method computes the same features of the frames of a video, or images of a sample, by themselves."""
    if probe.method == AUDIO_METHOD:
        return False
    is_video = probe.method == "get_video_features"
    drawn = _random_inputs(probe, [(2, 1, 3)] if is_video else [(1, 1, 3)] * 2)
    if drawn is None:
        return False
    inputs, items = drawn
    if not is_video and items.outer_dims:
        joined = _items({name: x.transpose(0, 1) for name, x in items.tensors.items()})
        assert joined is not None, "several images of a sample have the form of several samples"
        items = joined
    frames, numbers = items.frames()
    if sum(numbers) == len(numbers):
        return False
    return _are_close(_outputs(probe, {**inputs, **items.tensors}), _outputs(probe, {**inputs, **frames.tensors}))


def _random_inputs(probe: Probe, sizes: Sequence[Size]) -> tuple[dict[str, Any], _Items] | None:
    """Inputs with random pixels; None where the method does not take them."""
    return _with_random_features(visual_inputs(probe.model, probe.method, sizes))


def _random_audio(probe: Probe) -> tuple[dict[str, Any], _Items] | None:
    """Inputs of two audios, of which the second is shorter where the method takes masks; None where it takes none."""
    smallest = AudioInputs(probe.model).make(2) or {}
    masks = {name: mask for name, mask in smallest.items() if "mask" in name}
    frames = {mask.shape[-1] for mask in masks.values()}
    for repeats in (2, 1):
        inputs = {
            name: x.repeat(1, *(repeats if size in frames else 1 for size in x.shape[1:]))
            for name, x in smallest.items()
        }
        for name in masks:
            inputs[name][1, -(inputs[name].shape[-1] // 2) :] = 0
        drawn = _with_random_features(inputs)
        if drawn is not None and _outputs(probe, drawn[0]):
            return drawn
    return None


def _with_random_features(inputs: dict[str, Any] | None) -> tuple[dict[str, Any], _Items] | None:
    items = _items(inputs) if inputs is not None else None
    if inputs is None or items is None:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = {n: torch.randn(x.shape, generator=generator) for n, x in items.tensors.items() if x.is_floating_point()}
    return {**inputs, **drawn}, replace(items, tensors={**items.tensors, **drawn})


def _concatenated(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each output of several calls along its first dim; empty where that is not possible."""
    outputs = [[x[number] for x in parts] for number in range(min(map(len, parts)))]
    fit = all(len(x) == len(parts[0]) for x in parts) and all(len({x.shape[1:] for x in own}) == 1 for own in outputs)
    return [torch.cat(own) for own in outputs] if fit else []


def _are_close(whole: Sequence[Tensor], apart: Sequence[Tensor]) -> bool:
    if not whole or [x.shape for x in whole] != [x.shape for x in apart]:
        return False
    # Some outputs are masks.
    pairs = [(a.float(), b.float()) for a, b in zip(whole, apart, strict=True)]
    return all((a - b).abs().max() <= _ROUNDING * a.abs().max() for a, b in pairs)


def _outputs(probe: Probe, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Each output that the language model may read, of all items; empty where the encoder raises an error."""
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
    """The tensors in outputs without internal states; those of a sequence, which has one for each item, are joined."""
    if isinstance(outputs, Mapping):
        return [
            x for name, value in outputs.items() if not name.endswith(INTERNAL_STATES) for x in _of_layers(name, value)
        ]
    if isinstance(outputs, Tensor):
        # Ranks join the first dim, which is of all images in HunYuan-VL up to Transformers 5.17.
        return [outputs]
    parts = [x.flatten(0, -2) for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    return [torch.cat(parts)] if parts else []


def _of_layers(name: str, value: Any) -> list[Tensor]:
    """The tensors of an output. A sequence has one for each item in `pooler_output`, in others for each layer."""
    is_of_layers = name != "pooler_output" and isinstance(value, list | tuple)
    return [x for layer in value for x in _read(layer)] if is_of_layers else _read(value)


def share(
    method: Callable[..., Any],
    dummy: Callable[[], Mapping[str, Any] | None],
    given: Mapping[str, Any],
    rest: Mapping[str, Any],
    sharing: Sharing,
) -> Any:
    """`method(**given, **rest)`, computed by the ranks together.

    Args:
        method: returns features of images, videos or audio; the same call on all ranks of the sequences.
        dummy: makes the smallest arguments, for a rank that gets none.
        given: arguments that the method names.
        rest: those that it passes on.
    """
    group = get_parallel_state().sp_group
    # Precomputed inputs of the encoder, such as image_cu_seqlens, are of all items.
    precomputed = any(name.startswith(("image_", "video_", "audio_")) for name in rest)
    items = _items(given) if group is not None and not precomputed else None
    if group is None or items is None:
        return method(**given, **rest)
    parts, numbers = items.frames() if sharing.by_frame else (items, [1] * len(items.sizes))
    bounds = _bounds(parts.sizes, group.size())
    start, stop = bounds[group.rank()], bounds[group.rank() + 1]
    if start == stop:
        used: dict[str, Any] = dict(dummy() or {})
        smallest = _items(used)
        assert smallest is not None, "the smallest inputs have the same form"
        computed = sum(smallest.sizes)
    else:
        used = parts.part(start, stop)
        computed = sum(parts.sizes[start:stop])
    others = {name: value for name, value in given.items() if name not in items.tensors}
    outputs = method(**others, **used, **rest)
    sizes = parts.sizes if sharing.is_known else None
    return _Gathering(group, bounds, numbers, sizes, computed).outputs(outputs)


def _items(arguments: Mapping[str, Any]) -> _Items | None:
    """The images, videos or audios in the arguments of a method; None where the rows of each are unknown."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.dim()}
    features = next((value for name, value in tensors.items() if name.startswith(_FEATURES)), None)
    if features is None:
        return None
    grid = next((name for name in tensors if name.endswith(("_grid_thw", "_grid_hw"))), None)
    counts = next((name for name in tensors if name.startswith("num_frames_per_")), None)
    masks = (x for name, x in tensors.items() if "mask" in name and x.dim() == 2)
    lengths = next(masks, None) if any(name.startswith(AUDIO_FEATURES) for name in tensors) else None
    if grid is not None:
        sizes = tensors[grid].prod(-1).tolist()
        counts = grid if grid.endswith("_thw") else None
    elif counts is not None:
        sizes = tensors[counts].tolist()
    elif "image_sizes" in tensors:
        sizes = tensors["image_sizes"].prod(-1).tolist()
    elif lengths is not None:
        sizes = [max(1, length) for length in lengths.sum(-1).tolist()]
    else:
        sizes = [1] * len(features)
    rows = {name: _rows(value, sizes) for name, value in tensors.items()}
    known = {name: value for name, value in rows.items() if value is not None}
    is_proportional = grid is not None or (features.dim() == _IMAGE_DIMS and len(tensors) == 1)
    return _Items(tensors, known, sizes, counts, is_proportional) if len(known) == len(rows) else None


def _rows(value: Tensor, sizes: list[int]) -> list[int] | None:
    """How many rows of `value` each item has."""
    if len(value) == len(sizes):
        return [1] * len(sizes)
    return sizes if len(value) == sum(sizes) else None


def _bounds(sizes: Sequence[int], ranks: int) -> list[int]:
    """Where each rank's items start, and their end: contiguous parts of about the same size."""
    ends = list(accumulate(sizes, initial=0))
    found = [0]
    for rank in range(1, ranks):
        wanted = ends[-1] * rank / ranks
        nearest = min(range(len(ends)), key=lambda number: abs(ends[number] - wanted))
        found.append(max(found[-1], nearest))
    return [*found, len(sizes)]


@dataclass(frozen=True)
class _Gathering:
    """Joins the features that the ranks computed.

    Attributes:
        bounds: where each rank's parts start, and their end; a part is an item or a frame.
        numbers: parts of each item.
        sizes: of each part, in proportion to its features; None where the ranks exchange the numbers of features.
        computed: the sum of the sizes that this rank computed.
    """

    group: ProcessGroup
    bounds: list[int]
    numbers: list[int]
    sizes: list[int] | None
    computed: int

    def outputs(self, outputs: Any) -> Any:
        """The method's outputs with the features of all items, and without the states that only this rank has."""
        if not isinstance(outputs, Mapping):
            return self._of_items(outputs)
        found: Any = outputs
        pooled = pooled_features(outputs)
        if pooled is not None:
            found.pooler_output = self._of_items(pooled)
        for name, value in list(outputs.items()):
            if name == "pooler_output":
                continue
            if name == "last_hidden_state" and value is pooled:
                # Forwards may read either (Qwen-Omni's of audio).
                found[name] = found.pooler_output
            elif name == "last_hidden_state" and pooled is None:
                found[name] = self._of_items(value)
            elif name.endswith(INTERNAL_STATES):
                found[name] = None
            elif isinstance(value, list | tuple):
                # One tensor for each layer.
                found[name] = type(value)(self._of_items(layer) for layer in value)
            elif isinstance(value, Tensor):
                found[name] = self._of_items(value)
        return found

    def _of_items(self, value: Any) -> Any:
        """A tensor of all items, or a list with one for each."""
        if isinstance(value, Tensor):
            return self._joined(value)[0]
        own = list(value)
        nested = own[0].dim() - 1
        flat = [x.flatten(0, nested - 1) for x in own]
        joined, rows = self._joined(torch.cat(flat), [len(x) for x in flat])
        ends = list(accumulate(self.numbers, initial=0))
        parts = joined.split([sum(rows[start:stop]) for start, stop in pairwise(ends)])
        return type(value)(part.unflatten(0, (-1, *own[0].shape[1:nested])) if nested > 1 else part for part in parts)

    def _joined(self, own: Tensor, of_parts: list[int] | None = None) -> tuple[Tensor, list[int]]:
        """Features [rows of all items, ...] from those of this rank, and the rows of each part.

        Args:
            of_parts: the rows of this rank's parts; without, the first one is taken to have all.
        """
        start, stop = self.bounds[self.group.rank() :][:2]
        if self.sizes is None:
            mine = of_parts or [len(own), *[0] * (stop - start - 1)]
            # A rank without a part computed dummies, whose dims may be others.
            answers = gather_objects((mine[: stop - start], own.shape[1:]), self.group)
            rows = [count for of_rank, _ in answers for count in of_rank]
            dims = next(dims for of_rank, dims in answers if of_rank)
        else:
            share = Fraction(len(own), self.computed)
            rows, dims = [int(share * size) for size in self.sizes], own.shape[1:]
        counts = [sum(rows[start:stop]) for start, stop in pairwise(self.bounds)]
        if start == stop:
            own = own[:0].reshape(0, *dims)
        padding = own.new_zeros(max(counts) - len(own), *dims)
        parts = gather_outputs(torch.cat([own, padding]), 0, self.group).chunk(len(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), rows
