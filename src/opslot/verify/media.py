"""Samples with images, videos and audio for a tiny random model of any multimodal architecture.

Sizes of inputs come from the config and the model's code, the number of their placeholder tokens from the features that
the model computes, and positions from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opslot._base.boundaries import boundaries_of
from opslot._base.errors import ConfigError, error_text
from opslot._base.labels import IGNORE_INDEX
from opslot._base.source import method_parameters
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.models._multimodal.audio import AudioInputs
from opslot.models._multimodal.images import Size, visual_inputs
from opslot.models._multimodal.modalities import computes_features_inside, feature_module
from opslot.models._multimodal.probe import count_features
from opslot.verify.inlined import InlinedForm, InlinedInputs
from opslot.verify.random_model import SEED, text_ids

KINDS = ("image", "video", "audio")
# What the samples consist of, besides text. "mixed" has what a model takes of its kinds.
SAMPLES: dict[str, tuple[str, ...]] = {
    "text": (),
    "image": ("image", "image"),
    "video": ("video",),
    "audio": ("audio", "audio"),
    "mixed": ("image", "video", "audio", "image", "audio"),
}
# How the reason of a missing sample begins where the model raised an error.
RAISES = "Transformers raises"
_TYPE_IDS = {"image": 1, "video": 2, "audio": 3}
_SIZES: tuple[Size, ...] = ((1, 1, 2), (1, 2, 2))
_TEXT = 7
# Some models pad features to a number of tokens that only their forward has. With fewer tokens than features, models
# leave some out without an error.
_MOST_TOKENS = 64

Batch = dict[str, Any]


@dataclass(frozen=True)
class MediaSamples:
    """Samples of one row each, by their names in `SAMPLES`.

    Attributes:
        batches: arguments of the model's forward, with labels.
        missing: why a sample is missing.
    """

    batches: Mapping[str, Batch]
    missing: Mapping[str, str]


def media_samples(model: Any) -> MediaSamples | None:
    """The samples that `model`, of Transformers' own class, takes; None for a model without encoders."""
    holder = feature_module(model)
    found = None
    if holder is not None:
        own = [kind for kind in KINDS if hasattr(holder, f"get_{kind}_features")]
        tokens: dict[str, Sequence[int]] = {}
        found = _samples(own, lambda kinds: _first_that_runs(model, holder, kinds, tokens))
    inlined = InlinedInputs(model)
    # Kosmos-2 has a method for features, and places them by a mask instead of a token.
    by_mask = any(name.endswith("position_mask") for name in inlined.parameters)
    if not inlined.names or not (found is None or by_mask):
        return found
    forms: dict[str, InlinedForm] = {}
    return _samples(inlined.names, lambda kinds: _first_form_that_runs(inlined, kinds, forms))


def _samples(own: Collection[str], find: Callable[[Sequence[str]], tuple[Batch | None, str]]) -> MediaSamples:
    """Samples of the kinds that a model has.

    Args:
        find: the sample with some images, videos or audio, or why there is none.
    """
    batches: dict[str, Batch] = {}
    missing: dict[str, str] = {}
    for name, kinds in SAMPLES.items():
        taken = tuple(kind for kind in kinds if kind in own and (name == kind or kind not in missing))
        if name in KINDS and name not in own:
            if name != "audio" and "image" in own:
                missing[name] = f"it takes no {name}s"
            continue
        if name == "mixed" and len({*taken}) < 2:
            continue
        found, error = find(taken)
        if found is None:
            missing[name] = error
        else:
            batches[name] = found
    return MediaSamples(batches, missing)


def _first_form_that_runs(
    inlined: InlinedInputs, kinds: Sequence[str], known: dict[str, InlinedForm]
) -> tuple[Batch | None, str]:
    """A sample of a model whose forward computes features itself, or why there is none.

    Args:
        known: forms by kind, for samples of several kinds; that of the only one of `kinds` is added.
    """
    ways: Iterable[list[InlinedForm]]
    if len({*kinds}) == 1:
        ways = ([form] for form in inlined.forms(kinds[0], len(kinds)))
    elif {*kinds} <= known.keys():
        ways = [[known[kind] for kind in dict.fromkeys(kinds)]]
    else:
        return None, "its kinds have no samples"
    error = f"{type(inlined.model).__name__} does not compute its loss from {', '.join(inlined.names.values())}"
    raised: str = ""
    for forms in ways:
        try:
            batch = _inlined_sample(inlined, forms)
            without = batch | {form.name: torch.ones_like(batch[form.name]) for form in forms}
            with torch.no_grad():
                losses = [inlined.model(**b, use_cache=False).loss for b in (batch, without)]
        except Exception as caught:
            raised = raised or _raised(caught)
            continue
        if not forms or losses[0] != losses[1]:
            known |= {form.kind: form for form in forms}
            return batch, ""
    return None, raised or error


def _inlined_sample(inlined: InlinedInputs, forms: Sequence[InlinedForm]) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    config = inlined.model.config
    text = partial(_text, text_ids(config), generator)
    ids, kinds = text(), [""] * _TEXT
    for form in forms:
        for _ in range(form.count):
            token = [token_id(config, form.kind)] if form.has_token else text()[:1]
            ids += token * form.tokens + text()
            kinds += [form.kind] * form.tokens + [""] * _TEXT
    input_ids = torch.tensor([ids])
    batch = {
        "input_ids": input_ids,
        "labels": input_ids.masked_fill(torch.tensor([[bool(k) for k in kinds]]), IGNORE_INDEX),
    }
    for form in forms:
        batch |= inlined.inputs(form, torch.tensor([kind == form.kind for kind in kinds]), generator)
    return batch


def _first_that_runs(
    model: Any, holder: Any, kinds: Sequence[str], known: dict[str, Sequence[int]]
) -> tuple[Batch | None, str]:
    """A sample that the model takes, or why there is none.

    Args:
        known: by kind, the tokens of each image, video or audio, for samples of several kinds; those of the only one of
            `kinds` are added.
    """
    error = ""
    try:
        for video_token, counts in _ways(holder, kinds, known):
            try:
                batch = _sample(model, holder, kinds, video_token, counts)
                with torch.no_grad():
                    model(**batch, use_cache=False)
            except ConfigError:
                raise
            except Exception as raised:
                error = error or _raised(raised)
            else:
                if len({*kinds}) == 1:
                    known[kinds[0]] = counts
                return batch, ""
    except ConfigError as raised:
        return None, str(raised).splitlines()[0]
    except Exception as raised:
        error = error or _raised(raised)
    return None, error


def _raised(error: Exception) -> str:
    return error_text(f"{RAISES} {type(error).__name__}: {error}").splitlines()[0]


def _ways(holder: Any, kinds: Sequence[str], known: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Sequence[int]]]:
    """The kind whose token marks videos, and the tokens of each image, video and audio.

    Some models mark videos with the token of images, and some have other numbers of tokens than of features.
    """
    if len({*kinds}) > 1 and {*kinds} <= known.keys():
        places = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
        counts = [known[kind][place] for kind, place in zip(kinds, places, strict=True)]
    else:
        counts = [_tokens(holder, kind, _SIZES[kinds[:place].count(kind)]) for place, kind in enumerate(kinds)]
    yield "video", counts
    if "video" in kinds:
        yield "image", counts
    if len({*kinds}) == 1:
        yield from (("video", [count] * len(kinds)) for count in range(max(counts), _MOST_TOKENS))


def _sample(model: Any, holder: Any, kinds: Sequence[str], video_token: str, counts: Sequence[int]) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    text = partial(_text, text_ids(model.config), generator)
    ids, types = text(), [0] * _TEXT
    inputs: Batch = {}
    for kind in dict.fromkeys(kinds):
        inputs |= _random_inputs(holder, kind, _SIZES[: kinds.count(kind)], generator)
    for kind, count in zip(kinds, counts, strict=True):
        before, after = marks(model.config, kind)
        ids += [*before, *[token_id(model.config, video_token if kind == "video" else kind)] * count, *after, *text()]
        types += [0] * len(before) + [_TYPE_IDS[kind]] * count + [0] * (len(after) + _TEXT)
    type_ids = torch.tensor([types])
    input_ids = torch.tensor([ids])
    # Some features depend on the tokens, which are others here.
    batch = {**inputs, "input_ids": input_ids, "labels": input_ids.masked_fill(type_ids != 0, IGNORE_INDEX)}
    taken = method_parameters(type(model))
    seconds = torch.ones(kinds.count("video"))
    if hasattr(holder, "get_rope_index"):
        # Some models compute multimodal positions only where they get a mask.
        batch["attention_mask"] = torch.ones_like(input_ids)
    if "video" in kinds:
        batch |= {name: seconds for name in ("video_second_per_grid", "second_per_grid_ts") if name in taken}
    return batch | {name: type_ids for name in ("mm_token_type_ids", "token_type_ids") if name in taken}


def _text(ids: Tensor, generator: torch.Generator) -> list[int]:
    return ids[torch.randint(len(ids), (_TEXT,), generator=generator)].tolist()


def _inputs(holder: Any, kind: str, sizes: Sequence[Size]) -> Batch:
    """Arguments of the method that computes features of images, videos or audio, one of each size."""
    method = f"get_{kind}_features"
    found = AudioInputs(holder).make(len(sizes)) if kind == "audio" else visual_inputs(holder, method, sizes)
    if found is None:
        raise ConfigError(
            f"the inputs of {type(holder).__name__}.{method} are unknown",
            hint="opslot.bisect(model, batch) compares on inputs of your own",
        )
    return found


def _random_inputs(holder: Any, kind: str, sizes: Sequence[Size], generator: torch.Generator) -> Batch:
    return {
        name: torch.rand(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in _inputs(holder, kind, sizes).items()
        if isinstance(value, Tensor)
    }


def _tokens(holder: Any, kind: str, size: Size) -> int:
    """Features of one image, video or audio."""
    with torch.no_grad():
        return count_features(getattr(holder, f"get_{kind}_features")(**_inputs(holder, kind, (size,))))


def marks(config: Any, kind: str) -> tuple[list[int], list[int]]:
    """Tokens before and after an image, video or audio, from which some models know its kind."""
    for name in (kind, *(("vision",) if kind != "audio" else ())):
        start, end = (getattr(config, f"{name}_{side}_token_id", None) for side in ("start", "end"))
        if isinstance(start, int):
            return [start], [end] if isinstance(end, int) else []
    return [], []


def token_id(config: Any, kind: str) -> int:
    for inside in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(getattr(inside, name, None), int):
                return getattr(inside, name)
    raise ConfigError(
        f"{type(config).__name__} has no {kind}_token_id", hint=f"add it to config.json, or leave {kind} out"
    )


def with_common_divisor(batches: Sequence[Batch]) -> list[Batch]:
    """The batches with the number of labels in all of them, so that their losses add up to one mean."""
    targets = torch.tensor(sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in batches))
    return [{**batch, "num_items_in_batch": targets} for batch in batches]


def parallel_samples(samples: MediaSamples, check: str) -> list[list[Batch]]:
    """The samples of each of two processes, which have images, videos and text in different steps."""
    found = list(samples.batches)
    order = found if check == "sp" else [*found, *found[:1]] if len(found) % 2 else found
    batches = with_common_divisor([samples.batches[name] for name in order])
    return [batches[::2], batches[1::2]]


def packed_samples(positions: RopePositions, samples: MediaSamples) -> tuple[list[Batch], list[Batch]]:
    """Samples packed in rows, and each alone, with the labels of all in all losses."""
    names = [name for name in samples.batches if name != "mixed"]
    # Models that mark videos as images take no image and video in one row.
    apart = "image" in names and "mixed" not in samples.batches
    together = [name for name in names if name != "video"] if apart else names
    if len(together) == 1:
        # Two documents, so that one could see the other.
        together = together * 2
    rows = [together]
    if {"image", "audio"} <= {*together} and computes_features_inside(positions.model):
        # Such a forward sees which kinds the whole batch has: Phi-4 multimodal projects audio differently with images.
        rows = [[name for name in together if name != "image"], ["image"]]
    packed = [pack(positions, [samples.batches[name] for name in row]) for row in rows]
    targets = torch.tensor(sum(int((row["labels"] != IGNORE_INDEX).sum()) for row in packed))
    alone = []
    for name in together:
        labels = samples.batches[name]["labels"].clone()
        labels[:, 0] = IGNORE_INDEX
        alone.append({**samples.batches[name], "labels": labels, "num_items_in_batch": targets})
    return [{**row, "num_items_in_batch": targets} for row in packed], alone


def pack(positions: RopePositions, batches: Sequence[Batch]) -> Batch:
    """Samples of one row in one row, as documents."""
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    text = torch.cat([torch.arange(length) for length in lengths])
    per_token = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")
    names = list(dict.fromkeys(name for batch in batches for name in batch if name != "attention_mask"))
    packed = {
        name: torch.cat([batch[name] for batch in batches if name in batch], 1 if name in per_token else 0)
        for name in names
    }
    packed["labels"] = packed["labels"].masked_fill(text == 0, IGNORE_INDEX)
    position_ids = text[None]
    if positions.axes > 1:
        rotary = torch.cat([positions(batch["input_ids"][0], _features(batch)) for batch in batches], 1)[:, None]
        position_ids = torch.cat([text[None, None], rotary]) if positions.takes_text_axis else rotary
    return {**packed, "position_ids": position_ids, **boundaries_of(torch.tensor([0, *lengths]).cumsum(0))}


def _features(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
