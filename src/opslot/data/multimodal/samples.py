"""Conversations with images, video and audio, encoded by a checkpoint's own processor.

A sample is tokenized once, as text is: its tokens with the placeholders of its media, its labels and the estimated
FLOPs of its encoders go to the token cache, with what the features are computed from (paths, or the bytes that the
record holds). The features, such as pixel values, are computed again when the sample is in a batch, in the dataloader's
processes. So order, packing and resuming work as for text, and no decoded image is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opslot._base.errors import DataError
from opslot._base.labels import IGNORE_INDEX
from opslot._base.source import forward_source, method_parameters, source_of
from opslot.data.chat import ChatEncoder, Rendered
from opslot.data.chat_columns import caption_fix, media_renames
from opslot.data.collation import LABELED
from opslot.data.encoder import MediaDocument, SampleError, digest
from opslot.data.locations import Location
from opslot.data.messages import Message
from opslot.data.multimodal.encoder_cost import AudioRows, EncoderCost
from opslot.data.multimodal.expanded_text import moved_spans
from opslot.data.multimodal.loading import Loaded, MediaLoader
from opslot.data.multimodal.media import KINDS, from_bytes, to_bytes
from opslot.data.multimodal.parts import COLUMNS, has_unused_tag, media_of, separate_media
from opslot.data.multimodal.processor_call import (
    REJECTED,
    RecordingTokenizer,
    audio_without_tokens,
    call_processor,
    cut_audio,
    settings_of,
    source_has,
    special_tokens_option,
    videos_as_images,
)
from opslot.data.multimodal.rope_positions import RopePositions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

# Inputs that are not passed on: they are made for the packed sequence.
_OWN = ("input_ids", "attention_mask", "labels")
PER_TOKEN = ("token_type_ids", "mm_token_type_ids", "cross_attention_mask")


class MultimodalEncoder(ChatEncoder):
    """Encodes conversations with media as tokens with labels, and computes their features.

    Args:
        processor: of the checkpoint; its tokenizer must be a fast one.
        config: of the model.
        positions: position ids of the model.
        loader: of the processor; default without limits beyond those of `Limits`.
        check_features: returns what is wrong with the placeholders in tokens [S] or [B, S] for what the processor
            returned, "" for nothing, None where it is unknown.
        audio_rows: of the model's audio encoder, where they are known.
        options: as in `ChatEncoder`.
    """

    task = "vlm"
    optional = (*ChatEncoder.optional, *COLUMNS)

    def __init__(
        self,
        processor: ProcessorMixin,
        config: PreTrainedConfig,
        positions: RopePositions,
        max_seq_len: int,
        loader: MediaLoader | None = None,
        check_features: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], str | None] | None = None,
        audio_rows: AudioRows | None = None,
        **options: Any,
    ) -> None:
        self.processor: Any = processor
        # Of files without columns of media, how to rename those that seem to hold some.
        self._renames: dict[Path, str] = {}
        self._takes_frame_rate = source_has(type(processor), "video_second_per_grid")
        super().__init__(self.processor.tokenizer, max_seq_len, **options)
        self.config = config
        self.positions = positions
        self.loader = loader or MediaLoader(processor)
        self.check_features = check_features
        self.cost = EncoderCost(config, audio_rows, self.loader.component("audio"))
        # Of a prefix language model, whose prompt is bidirectional: its processor takes the answers apart as `suffix`.
        # Transformers before 5.23 has no parameter for it.
        self.has_prefix = "suffix" in method_parameters(type(processor), "__call__") or source_has(
            type(processor), 'pop("suffix"'
        )

    def take(self, file: Path, form: Sequence[str], names: Sequence[str]) -> None:
        super().take(file, form, names)
        if not set(names) & set(COLUMNS):
            self._renames[file] = media_renames(names)

    def fix_of(self, names: Sequence[str]) -> str:
        return super().fix_of(names) or caption_fix(names, COLUMNS)

    def identity(self) -> dict[str, Any]:
        return {
            **super().identity(),
            **self.loader.identity(),
            "task": "vlm",
            "processor": f"content {digest(repr(settings_of(self.processor)))}",
        }

    def samples(self, where: Location, record: Mapping[str, Any]) -> list[Any]:
        record, form = self._checked(where, record)
        record, media, is_unnamed = separate_media(record, form)
        rendered = self._render_record(record, form)
        tagged = any(has_unused_tag(sample.messages) for sample in rendered)
        rename = self._renames.get(where.file)
        if tagged and rename and not any(record.get(column) for column in COLUMNS):
            raise SampleError(f"its text has tags of media, and it has no column {', '.join(COLUMNS)}; {rename}")
        notes = [name for name, holds in (("tag", tagged), ("unnamed media", is_unnamed)) if holds]
        # A record counts once, whatever its number of samples.
        return [(*self._document(where, each, media), notes if each is rendered[0] else []) for each in rendered]

    def size_of(self, sample: Any) -> int:
        return self.batch_size

    def documents(
        self, batch: list[tuple[Location, Any]], problems: list[str], counts: Counter[str]
    ) -> Iterator[MediaDocument]:
        """Media are never cut."""
        limits = {"video": "data.max_frames or data.max_pixels", "image": "data.max_pixels"}
        for where, (document, kinds, notes) in batch:
            counts.update(notes)
            fix = next((f"lower {limit}, " for kind, limit in limits.items() if kind in kinds), "")
            cut = document.tokens["token"][self.max_seq_len :]
            can_truncate = not np.isin(cut, self.media_tokens).any()
            kept = self.limited(where, document.tokens, problems, counts, can_truncate=can_truncate, other_fix=fix)
            if self.is_trained(kept, counts):
                yield document._replace(tokens=kept)

    def _document(
        self, where: Location, sample: Rendered, media: list[tuple[str, Any]]
    ) -> tuple[MediaDocument, set[str]]:
        """A sample's tokens, labels and media, and the kinds of those."""
        used = media_of(sample.messages, media)
        description: dict[str, Any] = {
            "where": str(where),
            "folder": str(self.loader.folder_of(where.file)),
            "text": sample.text,
            "media": [list(item) for item in used],
        }
        loaded = self._load(description)
        if self._takes_one_image and len(loaded.media["image"]) != 1:
            raise SampleError(
                f"has {len(loaded.media['image'])} images, and {type(self.positions.model).__name__} takes one in "
                "every sample; leave the sample out, or use another model"
            )
        inputs, expanded = self._process(description, loaded)
        if missing := self._required_inputs - inputs.keys():
            raise SampleError(
                f"has no {', '.join(sorted(missing))}, which {type(self.positions.model).__name__} requires in every "
                "sample; leave out samples of text alone, or use another model"
            )
        ids = inputs["input_ids"][0]
        tokens = np.empty(len(ids), LABELED)
        tokens["token"] = ids
        tokens["label"] = self._labels(sample, loaded, ids, expanded)
        if self.has_prefix:
            description["prefix"] = int((tokens["label"] != IGNORE_INDEX).argmax())
        audio = loaded.media["audio"]
        problem = cut_audio(self.loader.component("audio"), audio, inputs.get("feature_attention_mask"))
        problem = problem or self._short_audio(sample.text, expanded, audio)
        if problem:
            raise SampleError(problem)
        self._check_placeholders(ids, inputs, used, sample.text)
        self._rotary_positions(ids, inputs, loaded)
        tokens["label"][np.isin(tokens["token"], self.media_tokens)] = IGNORE_INDEX
        document = MediaDocument(tokens, to_bytes(description), self.cost(inputs))
        return document, {kind for kind, _ in used}

    def prompt(self, messages: Sequence[Message], folder: Path) -> dict[str, Any]:
        """What the processor returns for a conversation that the model is to answer: inputs of `generate`.

        Args:
            messages: with media as in samples.
            folder: of relative paths.

        Raises:
            SampleError: media that cannot be read, or input that the chat template or the processor rejects.
        """
        record, media, _ = separate_media({"messages": list(messages)}, "messages")
        turns = record["messages"]
        description = {"folder": str(folder), "text": self._prompt_text(turns), "media": media_of(turns, media)}
        loaded = self._load(description)
        inputs, _ = self._process(description, loaded)
        if self._marks_videos_as_images(inputs["input_ids"][0], inputs):
            inputs = videos_as_images(inputs, [kind for kind, _ in description["media"]])
        return {**inputs, **loaded.model_options}

    def _prompt_text(self, messages: list[Message]) -> str:
        if not self.plain:
            return self._render(messages, None, prompt=True)[0]
        return "".join(part.get("text", "") for message in messages for part in message["content"])

    @cached_property
    def _required_inputs(self) -> set[str]:
        """Arguments that the forward pass of the model has no default for, such as BLIP's images."""
        parameters = method_parameters(type(self.positions.model)).values()
        return {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}

    @cached_property
    def _takes_one_image(self) -> bool:
        """Whether the model puts an image before the tokens of a row, and its loss leaves one out in any case."""
        return "logits[:, num_image_tokens:" in forward_source(type(self.positions.model))

    def _short_audio(self, text: str, expanded: str, audio: Sequence[np.ndarray]) -> str:
        """What is wrong where the model has no features of an audio; "" for nothing."""
        token = getattr(self.processor, "audio_token", None)
        # Some processors replace it by tokens of another kind.
        if not audio or token is None or self.tokenizer.convert_tokens_to_ids(token) not in self.media_tokens:
            return ""
        return audio_without_tokens(self.loader.component("audio"), audio, token, text, expanded)

    def _labels(self, sample: Rendered, loaded: Loaded, ids: torch.Tensor, expanded: str) -> np.ndarray:
        """Labels of a sample's tokens [S].

        Args:
            expanded: its text with all placeholders.
        """
        # Some processors add them themselves.
        for special in (False, True):
            encoded = self.tokenizer(expanded, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
            if encoded["input_ids"] == ids.tolist():
                break
        else:
            raise SampleError(f"{type(self.processor).__name__} returns other tokens than its text has")
        spans, stops = sample.spans, sample.stops
        if spans is not None:
            placeholders = self._placeholders(sample.text)
            spans = moved_spans(sample.text, expanded, spans, placeholders)
            stops = moved_spans(sample.text, expanded, list(stops), placeholders)
        return self.labels(ids.tolist(), spans, stops, encoded["offset_mapping"])

    def check(self, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> str | None:
        """What `check_features` returns for tokens [S] or [B, S]; None without it."""
        if self.check_features is None:
            return None
        return self.check_features(ids, _passed_on(inputs))

    def mixes_images_and_videos(self, ids: torch.Tensor, inputs: Collection[str]) -> bool:
        """Whether samples have images and videos with one placeholder; the model takes one kind at a time.

        Args:
            ids: [S] or [B, S].
            inputs: names of the features.
        """
        return {"pixel_values", "pixel_values_videos"} <= {*inputs} and not self._has_video_token(ids)

    def features(self, extra: bytes, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Features, and "position_ids" [axes, S], of a document with tokens [S].

        Raises:
            DataError: a file was changed or removed after the document was tokenized.
        """
        description = from_bytes(extra)
        where = description["where"]
        try:
            loaded = self._load(description)
            inputs, _ = self._process(description, loaded)
            ids = inputs["input_ids"][0]
            if not torch.equal(ids[: len(tokens)], tokens):
                raise DataError(
                    f"{where}: its images, video or audio have changed since it was tokenized",
                    hint="restore the files, or delete the token cache (data.cache_dir) and start a new run",
                )
            positions = self._rotary_positions(ids, inputs, loaded)
        except SampleError as error:
            raise DataError(
                f"{where}: {error}",
                found="it could be read when it was tokenized",
                hint="restore the file and continue with train.checkpoint.resume_from: latest",
            ) from error
        found = _passed_on(inputs)
        if self.has_prefix:
            found["token_type_ids"] = (torch.arange(len(ids)) >= description["prefix"]).long()[None]
        if self._marks_videos_as_images(ids, found):
            found = videos_as_images(found, [kind for kind, _ in description["media"]])
        used = ("mm_token_type_ids",) if self.positions.axes > 1 else ()
        found = {
            name: value[0, : len(tokens)] if name in PER_TOKEN else value
            for name, value in found.items()
            if name not in used
        }
        return {**found, "position_ids": positions[:, : len(tokens)]}

    def _load(self, description: Mapping[str, Any]) -> Loaded:
        return self.loader.load(description["media"], Path(description["folder"]))

    def _rotary_positions(self, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor], loaded: Loaded) -> torch.Tensor:
        """int64 [axes, S] for the tokens [S] of a sample with what the processor returned."""
        try:
            return self.positions(ids, {**_passed_on(inputs), **loaded.model_options})
        except REJECTED as error:
            raise SampleError(
                f"the model computes no position ids for it: {error}; the chat template must separate its images and "
                "videos by a token"
            ) from error

    def _process(self, description: Mapping[str, Any], loaded: Loaded) -> tuple[dict[str, torch.Tensor], str]:
        """The processor's outputs for a sample with its loaded media, and its text with all placeholders."""
        recorder = RecordingTokenizer(self.tokenizer)
        self.processor.tokenizer = recorder
        try:
            outputs = self._call(recorder, description["text"], loaded)
        except REJECTED as error:
            fix = self._surplus(description["text"], description["media"])
            raise SampleError(f"{type(self.processor).__name__} rejects it: {error}{fix}") from error
        finally:
            self.processor.tokenizer = self.tokenizer
        found = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        return found, recorder.text

    def _surplus(self, text: str, media: Sequence[Sequence[Any]]) -> str:
        """What to write instead of placeholders in messages, for an error; "" where they have none."""
        for kind in KINDS:
            token = getattr(self.processor, f"{kind}_token", None)
            if not isinstance(token, str) or not token or token == f"<{kind}>":
                continue
            if text.count(token) > sum(known == kind for known, _ in media):
                return f"; a message has {token}, which the chat template adds for each {kind}: write <{kind}> instead"
        return ""

    def _call(self, tokenizer: Any, text: str, loaded: Loaded) -> Any:
        """What the processor returns, or for text that it rejects without media, the tokenizer alone."""
        options = {"return_tensors": "pt", **special_tokens_option(self.tokenizer, text, plain=self.plain)}
        # Cosmos 3 Edge's processor does not return by default what its model needs.
        is_off = getattr(self.processor, "return_mm_token_type_ids", None) is False
        types = {"return_mm_token_type_ids": True} if is_off and self.positions.needs_types else {}
        try:
            return call_processor(
                self.processor,
                text,
                loaded.media,
                loaded.tracks,
                takes_frame_rate=self._takes_frame_rate,
                masks_audio=bool(loaded.media["audio"]) and self._masks_audio,
                **options,
                **types,
            )
        except REJECTED:
            tokens = (getattr(self.processor, f"{kind}_token", None) for kind in KINDS)
            if any(loaded.media.values()) or any(isinstance(token, str) and token in text for token in tokens):
                raise
            return tokenizer([text], **options)

    @cached_property
    def _masks_audio(self) -> bool:
        """Whether the model computes features only of the frames of audio that are not padding."""
        modules = self.positions.model.modules()
        classes = {type(module) for module in modules if hasattr(module, "get_audio_features")}
        return any("[feature_attention_mask.bool()]" in source_of(c.get_audio_features) for c in classes)

    @cached_property
    def audio_mask(self) -> tuple[str, str] | None:
        """The names of features of audio [N, frames, ...] and of the mask of their frames, as the extractor and the
        model have them; None without one.

        Phi-4 multimodal's extractor returns the mask for several audios alone.
        """
        names = [*getattr(self.loader.component("audio"), "model_input_names", ())]
        taken = set(method_parameters(type(self.positions.model))) - {*_OWN}
        mask = next((name for name in names[1:] if name.endswith("mask") and name in taken), None)
        return None if mask is None else (names[0], mask)

    @property
    def media_tokens(self) -> list[int]:
        """Tokens that the model replaces with features."""
        # Phi-4 multimodal's are in the configs of its encoders.
        parts = [self.config, *(getattr(self.config, f"{name}_config", None) for name in ("vision", "audio"))]
        names = [f"{kind}_token_{form}" for kind in KINDS for form in ("id", "index")]
        values = (getattr(part, name, None) for part in parts for name in names)
        return [value for value in values if isinstance(value, int)]

    def _placeholders(self, text: str) -> list[str]:
        """Strings in `text` that the processor may replace."""
        names = [name for name in dir(self.processor) if name.endswith("_token")]
        values = {getattr(self.processor, name, None) for name in names}
        return sorted((v for v in values if isinstance(v, str) and v and v in text), key=len, reverse=True)

    def _check_placeholders(
        self, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor], used: list[Any], text: str
    ) -> None:
        """Compare the placeholders of images, videos and audio with the features that the model will compute."""
        has_placeholder = bool(torch.isin(ids, torch.tensor(self.media_tokens)).any())
        if not used and has_placeholder:
            raise SampleError("its text holds a placeholder of an image, video or audio, but it has none")
        if used and self.media_tokens and not has_placeholder:
            raise SampleError(
                f"none of its tokens are those that the model replaces with features ({self.media_tokens} in "
                "config.json); use the processor and the chat template that ship with the checkpoint"
            )
        marks_videos_as_images = self._marks_videos_as_images(ids, inputs)
        if not marks_videos_as_images and self.mixes_images_and_videos(ids, inputs):
            raise SampleError("has images and videos, which the model marks with one token; split the sample")
        marked = "image" if marks_videos_as_images else "video"
        features: Counter[str] = Counter()
        for kind in ("image", "video"):
            grid, merge = inputs.get(f"{kind}_grid_thw"), self._merge_size(kind, inputs)
            if grid is None or merge is None:
                continue
            # Inkling 2's grid is of tokens, which the model's own code shows.
            if bool((grid[:, 1:] % merge).any()) and self.check(ids, inputs) != "":
                sizes = ", ".join(f"{h} x {w}" for _, h, w in grid.tolist())
                raise SampleError(
                    f"its {kind} has {sizes} patches, which do not divide by the merge size {merge} of the model; use "
                    "the processor that ships with the checkpoint"
                )
            features[marked if kind == "video" else kind] += int(grid.prod(-1).sum()) // merge**2
        unchecked = Counter(kind for kind, _ in used if f"{kind}_grid_thw" not in inputs)
        problem = ""
        for kind, count in features.items():
            token = getattr(self.config, f"{kind}_token_id", None)
            found = count if token is None else int((ids == token).sum())
            if found != count:
                problem = f"{found} {kind} placeholders in the text, but {count} features"
        for kind, count in unchecked.items():
            token = getattr(self.processor, f"{kind}_token", None)
            found = text.count(token) if isinstance(token, str) and token else 0
            # Some processors insert the tokens by themselves.
            if found and found != count:
                problem = f"{found} {kind} placeholders ({token}) in the text, but {count} {kind} inputs"
        if problem or unchecked:
            # Some models merge the frames of a video too.
            known = self.check(ids, inputs)
            problem = problem if known is None else known
        if problem:
            raise SampleError(
                f"{problem}; remove the placeholder from the text, or use the processor that ships with the checkpoint"
            )

    def _merge_size(self, kind: str, inputs: Mapping[str, torch.Tensor]) -> int | None:
        """Patches along each axis that the model merges to one feature."""
        sizes = [getattr(getattr(self.processor, f"{kind}_processor", None), "merge_size", None)]
        if f"{kind}_merge_sizes" not in inputs:
            sizes.insert(0, getattr(getattr(self.config, "vision_config", None), "spatial_merge_size", None))
        return next((size for size in sizes if isinstance(size, int)), None)

    def _marks_videos_as_images(self, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> bool:
        """Whether the placeholders of the frames of a sample's videos are those of images."""
        has_frames = "video_grid_thw" in inputs and "pixel_values_videos" in inputs
        return has_frames and not self._has_video_token(ids)

    def _has_video_token(self, ids: torch.Tensor) -> bool:
        """Whether tokens have the placeholder of videos; True where the config does not name it."""
        token = getattr(self.config, "video_token_id", None)
        return token is None or bool((ids == token).any())


def _passed_on(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the processor returned without what is made for the packed sequence."""
    return {name: value for name, value in inputs.items() if name not in _OWN}
