"""Samples with images and videos for a tiny random model of any vision-language architecture.

Sizes of images come from the config, the number of their placeholder tokens from the features that the model computes,
and positions from the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opslot._base.errors import ConfigError, error_text
from opslot.data.rope_positions import RopePositions
from opslot.models._images import Size, visual_inputs
from opslot.models._modalities import feature_module
from opslot.verify.random_model import text_ids

# What the samples consist of, besides text. Some models take no image and video in one sample.
SAMPLES: dict[str, tuple[str, ...]] = {
    "text": (),
    "image": ("image", "image"),
    "video": ("video",),
    "mixed": ("image", "video", "image"),
}
_TYPE_IDS = {"image": 1, "video": 2}
_SIZES: tuple[Size, ...] = ((1, 1, 2), (1, 2, 2))
_TEXT = 7

Batch = dict[str, Any]


@dataclass(frozen=True)
class VisualSamples:
    """Samples of one row each, by their names in `SAMPLES`.

    Attributes:
        batches: arguments of the model's forward, with labels.
        missing: why a sample is missing.
    """

    batches: Mapping[str, Batch]
    missing: Mapping[str, str]


def visual_samples(model: Any, seed: int) -> VisualSamples | None:
    """The samples that `model`, of Transformers' own class, takes; None for a model without images.

    Raises:
        ConfigError: no images can be made for it.
    """
    holder = feature_module(model)
    if holder is None or not hasattr(holder, "get_image_features"):
        return None
    batches: dict[str, Batch] = {}
    missing: dict[str, str] = {}
    for name, kinds in SAMPLES.items():
        absent = [kind for kind in kinds if not hasattr(holder, f"get_{kind}_features")]
        if absent:
            missing[name] = f"it takes no {absent[0]}s"
            continue
        found, error = _first_that_runs(model, holder, kinds, seed)
        if found is None:
            missing[name] = f"Transformers raises {error}"
        else:
            batches[name] = found
    if "image" not in batches:
        raise ConfigError(f"no images can be made for it: {missing['image']}")
    return VisualSamples(batches, missing)


def _first_that_runs(model: Any, holder: Any, kinds: Sequence[str], seed: int) -> tuple[Batch | None, str]:
    """A sample that the model takes; some models mark videos with the token of images."""
    error = ""
    for video_token in ("video", "image"):
        try:
            batch = _sample(model, holder, kinds, video_token, seed)
            with torch.no_grad():
                model(**batch, use_cache=False)
        except Exception as raised:
            error = error or error_text(f"{type(raised).__name__}: {raised}").splitlines()[0]
        else:
            return batch, ""
    return None, error


def _sample(model: Any, holder: Any, kinds: Sequence[str], video_token: str, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    text = partial(_text, text_ids(model.config), generator)
    ids, types = text(), [0] * _TEXT
    inputs: Batch = {}
    for kind in dict.fromkeys(kinds):
        inputs |= _random_pixels(holder, kind, _SIZES[: kinds.count(kind)], generator)
    for place, kind in enumerate(kinds):
        count = _tokens(holder, kind, _SIZES[kinds[:place].count(kind)])
        ids += [_token_id(model.config, kind if kind == "image" else video_token)] * count + text()
        types += [_TYPE_IDS[kind]] * count + [0] * _TEXT
    type_ids = torch.tensor([types])
    input_ids = torch.tensor([ids])
    batch = {"input_ids": input_ids, "labels": input_ids.masked_fill(type_ids != 0, -100), **inputs}
    taken = inspect.signature(type(model).forward).parameters
    return batch | {name: type_ids for name in ("mm_token_type_ids", "token_type_ids") if name in taken}


def _text(ids: Tensor, generator: torch.Generator) -> list[int]:
    return ids[torch.randint(len(ids), (_TEXT,), generator=generator)].tolist()


def _random_pixels(holder: Any, kind: str, sizes: Sequence[Size], generator: torch.Generator) -> dict[str, Tensor]:
    found = visual_inputs(holder, f"get_{kind}_features", sizes)
    if found is None:
        raise ConfigError(f"the inputs of {type(holder).__name__}.get_{kind}_features are unknown")
    return {
        name: torch.rand(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in found.items()
    }


def _tokens(holder: Any, kind: str, size: Size) -> int:
    """Features of one image or video."""
    inputs = visual_inputs(holder, f"get_{kind}_features", (size,)) or {}
    with torch.no_grad():
        outputs = getattr(holder, f"get_{kind}_features")(**inputs)
    features = outputs.get("pooler_output", outputs["last_hidden_state"]) if isinstance(outputs, Mapping) else outputs
    while isinstance(features, tuple | list) and isinstance(features[0], tuple | list):
        features = features[0]
    parts = [features] if isinstance(features, Tensor) else features
    return sum(part.shape[:-1].numel() for part in parts)


def _token_id(config: Any, kind: str) -> int:
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    raise ConfigError(f"{type(config).__name__} has no {kind}_token_id")


def with_common_divisor(batches: Sequence[Batch]) -> list[Batch]:
    """The batches with the number of labels in all of them, so that their losses add up to one mean."""
    targets = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
    return [{**batch, "num_items_in_batch": targets} for batch in batches]


def parallel_samples(samples: VisualSamples, check: str) -> list[list[Batch]]:
    """The samples of each of two processes, which have images, videos and text in different steps."""
    found = list(samples.batches)
    order = found if check == "sp" else [*found, *found[:1]] if len(found) % 2 else found
    batches = with_common_divisor([samples.batches[name] for name in order])
    return [batches[::2], batches[1::2]]


def packed_samples(positions: RopePositions, samples: VisualSamples) -> tuple[list[Batch], list[Batch]]:
    """Samples packed in one row, and each alone, with the labels of all in both losses."""
    names = [name for name in samples.batches if name != "mixed"]
    # Models that mark videos as images take no image and video in one row.
    together = names if "mixed" in samples.batches else [name for name in names if name != "video"]
    documents = [samples.batches[name] for name in together]
    packed = pack(positions, documents)
    targets = torch.tensor(int((packed["labels"] != -100).sum()))
    alone = []
    for document in documents:
        labels = document["labels"].clone()
        labels[:, 0] = -100
        alone.append({**document, "labels": labels, "num_items_in_batch": targets})
    return [{**packed, "num_items_in_batch": targets}], alone


def pack(positions: RopePositions, batches: Sequence[Batch]) -> Batch:
    """Samples of one row in one row, as documents."""
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    text = torch.cat([torch.arange(length) for length in lengths])
    per_token = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")
    names = list(dict.fromkeys(name for batch in batches for name in batch))
    packed = {
        name: torch.cat([batch[name] for batch in batches if name in batch], 1 if name in per_token else 0)
        for name in names
    }
    packed["labels"] = packed["labels"].masked_fill(text == 0, -100)
    position_ids = text[None]
    if positions.axes > 1:
        rotary = torch.cat([positions(batch["input_ids"][0], _features(batch)) for batch in batches], 1)[:, None]
        position_ids = torch.cat([text[None, None], rotary]) if positions.takes_text_axis else rotary
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed |= {"position_ids": position_ids, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    return packed | {"max_length_q": max(lengths), "max_length_k": max(lengths)}


def _features(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
