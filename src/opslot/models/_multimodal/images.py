"""The smallest legal images and videos of a vision-language model, from its config and the code that reads them.

What `get_image_features` and `get_video_features` take differs by how a model cuts images: patches of any number with a
grid, images of one size, crops of one size, or images of any size with their sizes. The methods' parameters show which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.source import forward_source, method_parameters, source_of
from opslot.models._multimodal.probe import Inputs, find_once, first_with_features

Size = tuple[int, int, int]
# Some models squeeze the axis of tokens, so one token is not legal.
_SMALLEST = ((1, 1, 2),)
_CONFIGS = ("vision_config", "vq_config")
_SIDES = ("image_size", "resolution")
# Pixels along each axis that become one token of an image tokenizer.
_FACTOR = "vision_spatial_factor"
_NUMBERED = "flattened_patches"
_MERGE = ("spatial_merge_size", "merge_size", "merge_kernel_size")
# The grid is of tokens, which the encoder multiplies by the patches that become one.
_GRID_OF_TOKENS = re.compile(r"_grid_thw(\.cpu\(\))? \* torch\.tensor\(\[1, merge, merge\]\)")
# Sides to try where no config has one.
_TRIED = (64, 128, 224, 256, 384, 512)


def visual_inputs(holder: Any, method: str, sizes: Sequence[Size] = _SMALLEST) -> dict[str, Any] | None:
    """Arguments of `get_image_features` or `get_video_features` for images of ones, and the settings that they require
    of the config; None where they are unknown.

    Args:
        holder: the module with the method.
        sizes: of each image or video, (frames, height, width) in the smallest units that the model takes. A model with
            images of one size uses their number alone.
    """
    reader = _Reader(holder, method)
    found = reader.inputs(sizes)
    if found is None:
        return None
    required = {name for name, p in reader.parameters.items() if p.default is p.empty} - found.keys()
    # An encoder that also reads the question.
    texts = {name: reader.text(len(sizes)) for name in required if name.endswith("_input_ids")}
    settings = {name: reader.setting(name) for name in required - texts.keys()} | texts
    return {**found, **settings} if None not in settings.values() else None


class _Reader:
    """What a method that computes features takes."""

    def __init__(self, holder: Any, method: str) -> None:
        self.holder = holder
        self.method = method
        self.parameters = {
            name: p for name, p in method_parameters(type(holder), method).items() if p.kind is not p.VAR_KEYWORD
        }
        self.source = source_of(getattr(type(holder), method))
        self.pixels = next(name for name in self.parameters if name.startswith(("pixel_values", _NUMBERED)))
        self.kind = "video" if method == "get_video_features" else "image"
        configs = (getattr(holder.config, name, None) for name in _CONFIGS)
        found = next((config for config in configs if config is not None), None)
        # A model without encoder, whose language model reads projected patches.
        self.vision: Any = holder.config if found is None and hasattr(holder.config, "patch_size") else found
        towers = (
            m for m in holder.modules() if m is not holder and type(getattr(m, "config", None)) is type(self.vision)
        )
        self.tower: Any = next(towers, holder)
        parameter = next(holder.parameters())
        self.place: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}

    def setting(self, name: str) -> Any:
        """A value of the config, of the model or the tower."""
        return next((v for c in (self.holder.config, self.vision) if (v := getattr(c, name, None)) is not None), None)

    def text(self, count: int) -> Tensor:
        """Ids of `count` short texts."""
        return torch.ones(count, 2, dtype=torch.int64, device=self.place["device"])

    def inputs(self, sizes: Sequence[Size]) -> dict[str, Tensor] | None:
        if self.vision is None:
            return None
        if self.pixels == _NUMBERED:
            return self._numbered_patches(sizes)
        if self.vision is self.holder.config:
            return {
                self.pixels: self._ones(len(sizes), max(map(math.prod, sizes)), self._channels() * self._patch_area())
            }
        if f"{self.kind}_token_pooling" in self.parameters:
            return self._pooled_patches(sizes)
        if not hasattr(self.vision, "patch_size"):
            return self._any_size(sizes) if hasattr(self.tower, _FACTOR) else self._one_size(sizes)
        if f"{self.kind}_grid_thw" in self.parameters:
            return self._patches(sizes)
        if f"{self.kind}_grid_hw" in self.parameters:
            return self._flat_patches(sizes)
        if f"{self.kind}_position_ids" in self.parameters:
            return self._placed_patches(sizes)
        if any(name.startswith("target_sizes") for name in self.parameters):
            return self._joined_patches(sizes)
        if "spatial_shapes" in self.parameters:
            return self._padded_patches(sizes)
        if "image_sizes" in self.parameters and "image_sizes" in method_parameters(type(self.tower)):
            return self._any_size(sizes)
        if "image_sizes" in self.parameters and getattr(self.holder.config, "image_grid_pinpoints", None):
            return self._crops(len(sizes))
        return self._one_size(sizes)

    def _patches(self, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """Patches of all images in one sequence, with the patches along each axis."""
        merge = self._merge()
        if _GRID_OF_TOKENS.search(forward_source(type(self.tower))):
            # Patches of a token beside each other, and their channels last (Inkling 2).
            sides = [side * merge for side in _pair(self.vision.patch_size)]
            count = sum(map(math.prod, sizes))
            pixels = self._ones(count, *sides, self._channels())
            return {self.pixels: pixels, f"{self.kind}_grid_thw": self._integers(sizes)}
        merged = getattr(self.vision, "temporal_merge_size", 1) if self.kind == "video" else 1
        grid = [[frames * merged, height * merge, width * merge] for frames, height, width in sizes]
        projection = self._projection()
        count = sum(map(math.prod, grid))
        whole = projection.weight.dim() == 4 and not self._splits_channels(projection)
        shape = projection.weight.shape[1:] if whole else [projection.weight.shape[1:].numel()]
        found = {self.pixels: self._ones(count, *shape), f"{self.kind}_grid_thw": self._integers(grid)}
        if f"{self.kind}_merge_sizes" in self.parameters:
            found[f"{self.kind}_merge_sizes"] = self._integers([merge] * len(sizes))
        return found

    def _flat_patches(self, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """Patches of all images in one sequence, with their rows and columns."""
        merge = self._merge()
        grid = [[height * merge, width * merge] for _, height, width in sizes]
        count = sum(map(math.prod, grid))
        return {
            self.pixels: self._ones(count, self._channels() * self._patch_area()),
            f"{self.kind}_grid_hw": self._integers(grid),
        }

    def _placed_patches(self, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """Patches of each image (or frame), padded to those of the largest, with their positions; -1 is padding."""
        pool = getattr(self.vision, "pooling_kernel_size", 1)
        frames = [(height * pool, width * pool) for count, height, width in sizes for _ in range(count)]
        most = max(height * width for height, width in frames)
        positions = torch.full((len(frames), most, 2), -1, device=self.place["device"])
        for row, (height, width) in enumerate(frames):
            y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            positions[row, : height * width] = torch.stack([x, y], -1).flatten(0, 1)
        found = {
            self.pixels: self._ones(len(frames), most, self._projection().weight.shape[1:].numel()),
            f"{self.kind}_position_ids": positions,
        }
        if self._takes_outer_dim():
            counts = (len(sizes), sizes[0][0])
            return {name: value.unflatten(0, counts) for name, value in found.items()}
        if "num_frames_per_video" in self.parameters:
            found["num_frames_per_video"] = self._integers([count for count, _, _ in sizes])
        return found

    def _padded_patches(self, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """Patches of each image, padded to those of the largest, with a mask."""
        factor = getattr(self.holder.config, "downsample_factor", 1)
        shapes = [(height * factor, width * factor) for _, height, width in sizes]
        most = max(height * width for height, width in shapes)
        mask = self._integers([[1] * (h * w) + [0] * (most - h * w) for h, w in shapes])
        return {
            self.pixels: self._ones(len(shapes), most, self._projection().weight.shape[1:].numel()),
            "spatial_shapes": self._integers(shapes),
            "pixel_attention_mask": mask,
        }

    def _numbered_patches(self, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """Patches of each image, after their row and column from 1 on, padded with zeros to those of the largest."""
        most = max(height * width for _, height, width in sizes)
        patches = self._ones(len(sizes), most, 2 + self._projection().weight.shape[1:].numel())
        for image, (_, height, width) in zip(patches, sizes, strict=True):
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            image[: height * width, :2] = torch.stack([rows, columns], -1).flatten(0, 1) + 1
            image[height * width :] = 0
        return {self.pixels: patches}

    def _joined_patches(self, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """Patches of all images beside each other in one image of a patch's height; of a video, for each frame."""
        merges = ("window_kernel_size", "merge_kernel_size")
        kernels = [getattr(config, name, 1) for config in (self.vision, self.holder.config) for name in merges]
        unit = math.prod(_pair(kernel)[0] for kernel in kernels)
        shapes = [(height * unit, width * unit) for _, height, width in sizes]
        patch = _pair(self.vision.patch_size)
        frames = sizes[0][0] if self.kind == "video" else 1
        width = sum(map(math.prod, shapes)) * patch[1]
        name = next(name for name in self.parameters if name.startswith("target_sizes"))
        return {
            self.pixels: self._ones(frames, self._channels(), patch[0], width),
            name: self._integers(shapes),
        }

    def _pooled_patches(self, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """A crop for each image or frame, and the patches of which a token is the mean, one here."""
        patches = self.vision.num_position_embeddings
        crops = [height * width for frames, height, width in sizes for _ in range(frames)]
        pooled = torch.cat([torch.arange(count) + i * patches for i, count in enumerate(crops)])
        # Of an image, as a whole and in crops.
        grids = [list(size) if self.kind == "video" else [*size[1:], 0, 0] for size in sizes]
        return {
            self.pixels: self._ones(len(crops), patches, self._channels() * self._patch_area()),
            f"{self.kind}_token_pooling": pooled[:, None].to(self.place["device"]),
            f"{self.kind}_grids": self._integers(grids),
        }

    def _any_size(self, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """Images padded to the largest, with their sizes."""
        sides = _pair(getattr(self.tower, _FACTOR, None) or self.vision.patch_size)
        unit = [side * self._merge() for side in sides]
        pixels = [[height * unit[0], width * unit[1]] for _, height, width in sizes]
        largest = [max(side) for side in zip(*pixels, strict=True)]
        return {self.pixels: self._ones(len(sizes), self._channels(), *largest), "image_sizes": self._integers(pixels)}

    def _crops(self, count: int) -> dict[str, Tensor] | None:
        """Crops of one size and the whole image in that size, for the smallest resolution."""
        side = self._image_size(self.vision)
        if side is None:
            return None
        height, width = min(self.holder.config.image_grid_pinpoints, key=math.prod)
        crops = 1 + (height // side[0]) * (width // side[1])
        return {
            self.pixels: self._ones(count, crops, self._channels(), *side),
            "image_sizes": self._integers([[height, width]] * count),
        }

    def _one_size(self, sizes: Sequence[Size]) -> dict[str, Tensor] | None:
        """Images of one size; where a model takes several images a sample, or frames, each has its own dim."""
        side = self._image_size(self.vision) or find_once(self.holder, self.method, self._smallest_side)
        return None if side is None else self._of_side(side, sizes)

    def _of_side(self, side: tuple[int, int], sizes: Sequence[Size]) -> Inputs:
        dims = re.search(rf"^\s*(\w+(?:, \w+)+) = {self.pixels}\.shape$", self.source, re.M)
        masks = re.findall(rf"\b{self.pixels}\[(\w+)\]", self.source)
        nested = (dims is not None and dims[1].count(",") == 4) or bool(masks) or self._takes_outer_dim()
        frames = sizes[0][0] if self.kind == "video" else 1
        outer = (len(sizes), frames) if nested else (len(sizes),)
        found = {self.pixels: self._ones(*outer, self._channels(), *side)}
        found |= {name: self._ones(*outer).bool() for name in masks if name in self.parameters}
        for name, other in self._other_sides():
            found[name] = self._ones(*outer, self._channels(), *other)
        return found

    def _smallest_side(self) -> tuple[int, int] | None:
        """The smallest size of an image that gives features; None where none is found."""
        made = ({n: x.cpu().float() for n, x in self._of_side(side, _SMALLEST).items()} for side in self._sides())
        found = first_with_features(self.holder, self.method, lambda _: made)
        return None if found is None else _pair(found[self.pixels].shape[-2:])

    def _sides(self) -> Iterator[tuple[int, int]]:
        """Sizes of images to try: those of the encoder's own modules (of timm), then others."""
        own = (getattr(module, "img_size", None) for module in self.tower.modules())
        yield from (_pair(size) for size in own if isinstance(size, int | list | tuple))
        yield from ((side, side) for side in _TRIED)

    def _other_sides(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Required parameters with the same images in another size, such as `high_res_pixel_values`, and that size."""
        for name, p in self.parameters.items():
            if p.default is p.empty and name.endswith(f"_{self.pixels}"):
                config = getattr(self.holder.config, f"{name.removesuffix(self.pixels)}vision_config", None)
                side = None if config is None else self._image_size(config)
                if side is not None:
                    yield name, side

    def _takes_outer_dim(self) -> bool:
        """Whether the first dim is of samples or videos, and the second of their images or frames."""
        return f"{self.pixels}.flatten(0, 1)" in self.source

    def _ones(self, *shape: int) -> Tensor:
        # Zeros would be padding in some models.
        return torch.ones(*shape, **self.place)

    def _integers(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.place["device"])

    def _merge(self) -> int:
        """Patches along each axis that become one token."""
        found = (getattr(config, name, None) for config in (self.vision, self.holder.config) for name in _MERGE)
        ratio = getattr(self.holder.config, "downsample_ratio", None)
        return next((_pair(value)[0] for value in found if value is not None), round(1 / ratio) if ratio else 1)

    def _image_size(self, config: Any) -> tuple[int, int] | None:
        nested = (getattr(config, name, None) for name in config.sub_configs)
        configs = [config, *(inside for inside in nested if inside is not None)]
        size = next((v for c in configs for name in _SIDES if (v := getattr(c, name, None)) is not None), None)
        strides = getattr(config, "patch_stride", None)
        if size is None and isinstance(strides, list | tuple):
            # A pyramid of stages, which takes any size.
            size = 2 * math.prod(strides)
        return None if size is None else _pair(size)

    def _channels(self) -> int:
        found = (getattr(self.vision, name, None) for name in ("num_channels", "in_channels"))
        return next((channels for channels in found if channels), 3)

    def _patch_area(self) -> int:
        return math.prod(_pair(self.vision.patch_size))

    def _projection(self) -> Any:
        """The first matmul or convolution of the tower, which embeds patches."""
        kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
        found = [(name, m) for name, m in self.tower.named_modules() if isinstance(m, kinds)]
        return next((m for name, m in found if "patch" in name), found[0][1])

    def _splits_channels(self, projection: nn.Module) -> bool:
        """Whether the forward of a patch embedding gives flat patches their channels, height and width."""
        owner = next(m for m in self.tower.modules() if any(child is projection for child in m.children()))
        return re.search(r"\.(view|reshape)\([^)]*(in|num)_channels", forward_source(type(owner))) is not None


def _pair(size: Any) -> tuple[int, int]:
    """Height and width of a config's size, which may be one number."""
    if isinstance(size, dict):
        size = list(size.values())
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
