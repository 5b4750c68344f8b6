"""Calls of a checkpoint's processor with the media of one sample."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from opslot._base.source import method_parameters, source_of
from opslot.data.multimodal.media import Video

# Of tokens, in `mm_token_type_ids`: 0 is text and 2 a video.
_TYPE_OF_IMAGE = 1
# What processors raise for input that they do not take.
REJECTED = (
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    OSError,
    # More placeholders than images.
    StopIteration,
)


def call_processor(
    processor: Any,
    text: str,
    media: dict[str, list[Any]],
    tracks: Sequence[int | None],
    *,
    takes_frame_rate: bool,
    masks_audio: bool,
    **options: Any,
) -> Any:
    """What `processor` returns for one sample.

    Args:
        media: by kind, images, `Video`s and samples of audio, in the order of the text.
        tracks: for each audio, the number of the video that it is the track of; None for audio by itself.
        takes_frame_rate: the processor takes one rate of frames for all videos, with a default.
        masks_audio: the model computes features only of the frames in `feature_attention_mask`, so the padding of
            audio to the longest that the processor takes (5 minutes, 15 MB, for Qwen-Omni) is left out.
        options: of the processor.

    Raises:
        ValueError: videos with tracks whose frames have different rates.
    """
    arguments: dict[str, Any] = {}
    if media["image"]:
        # Of one sample: LLaVA-OneVision splits an image in tiles only where it is the only one of its sample.
        # GOT-OCR's processor takes a nested list for the pages of one document.
        is_flat = source_has(type(processor), "multi_page")
        arguments["images"] = media["image"] if is_flat else [media["image"]]
    if media["audio"]:
        arguments["audio"] = media["audio"]
        if audio_options := _of_audio(processor, media["audio"], masks_audio):
            arguments["audio_kwargs"] = audio_options
    videos: list[Video] = media["video"]
    if videos:
        arguments |= _of_videos([_of_one_step(video, processor.video_processor) for video in videos])
    rates = [video.sampled_fps for video in videos] if takes_frame_rate else []
    if rates:
        arguments["fps"] = rates[0]
    if any(track is not None for track in tracks):
        if len({round(rate, 6) for rate in rates}) > 1:
            raise ValueError(
                f"the frames of its videos have different rates ({', '.join(f'{rate:.3g}' for rate in rates)} per "
                "second), and their audio is aligned at one rate; lower data.max_fps, or split the sample"
            )
        arguments |= _of_tracks(processor, tracks)
    outputs = processor(text=[text], **options, **arguments)
    if rates:
        steps = processor.video_processor.temporal_patch_size
        outputs["video_second_per_grid"] = torch.tensor([steps / rate for rate in rates])
    return outputs


def cut_audio(extractor: Any, audio: Sequence[Any], mask: torch.Tensor | None) -> str:
    """What is wrong where an extractor left out the end of an audio; "" for nothing.

    Args:
        mask: of the frames that it returned for each audio, [audios, frames]; None where it returns none.
    """
    if mask is None or len(mask) != len(audio):
        return ""
    for samples, frames in zip(audio, mask.sum(-1).tolist(), strict=True):
        kept = frames * extractor.hop_length
        if kept + extractor.n_fft < len(samples):
            seconds, limit = (count / extractor.sampling_rate for count in (len(samples), kept))
            return f"has audio of {seconds:.1f} s, of which the model gets the first {limit:.1f} s; split it"
    return ""


def audio_without_tokens(extractor: Any, audio: Sequence[Any], token: str, text: str, expanded: str) -> str:
    """What is wrong where a processor replaced the placeholder of an audio by nothing; "" for nothing.

    Args:
        text: of the sample.
        expanded: the same with all placeholders.
    """
    runs = re.compile(f"(?:{re.escape(token)})+")
    if len(runs.findall(expanded)) >= len(runs.findall(text)):
        return ""
    seconds = min(map(len, audio)) / extractor.sampling_rate
    return f"has audio of {seconds:.3f} s, which is too short for a feature of the model; leave it out"


def settings_of(processor: Any) -> list[str]:
    """The settings of a processor without those of its tokenizer, in a fixed order."""
    # Where the processor was read from does not matter.
    return sorted(map(repr, _flat({name: value for name, value in processor.to_dict().items() if name != "tokenizer"})))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    else:
        yield name, repr(value)


def source_has(processor: type, name: str) -> bool:
    """Whether Transformers' code of a processor has a name."""
    theirs = (cls for cls in processor.__mro__ if cls.__module__.startswith("transformers"))
    return any(name in source_of(cls) for cls in theirs)


def _of_one_step(video: Video, video_processor: Any) -> Video:
    """A video of fewer frames than the model merges to one step, such as a clip of one frame, with its last one again.

    Some processors do so themselves, and others raise an error.
    """
    missing = getattr(video_processor, "temporal_patch_size", 1) - len(video.frames)
    if missing <= 0:
        return video
    frames = np.concatenate([video.frames, *[video.frames[-1:]] * missing])
    return replace(video, frames=frames, indices=[*video.indices, *[video.indices[-1]] * missing])


def _of_videos(videos: Sequence[Video]) -> dict[str, Any]:
    return {
        "videos": [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in videos],
        "do_sample_frames": False,
        # Some processors read it and do not ask for it themselves.
        "return_metadata": True,
        "video_metadata": [
            {"total_num_frames": video.total, "fps": video.fps, "frames_indices": video.indices} for video in videos
        ],
    }


def _of_tracks(processor: Any, tracks: Sequence[int | None]) -> dict[str, Any]:
    if hasattr(processor, "_resolve_audio_from_video"):
        return {"load_audio_from_video": True, "audio_from_video_indices": list(tracks)}
    # Transformers before 5.23.
    return {"use_audio_in_video": True}


def _of_audio(processor: Any, audio: Sequence[Any], masks_audio: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    extractor = getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
    # An extractor that takes the rate logs a warning in each call without it.
    if extractor is not None and "sampling_rate" in method_parameters(type(extractor), "__call__"):
        options["sampling_rate"] = extractor.sampling_rate
    if masks_audio:
        options["max_length"] = _padded_length(extractor, audio)
    return options


def _padded_length(extractor: Any, audio: Sequence[Any]) -> int:
    """Samples of the longest audio and of silence that a window at its end reaches, in whole frames."""
    longest = max(map(len, audio)) + extractor.n_fft
    return min(int(extractor.n_samples), -(-longest // extractor.hop_length) * extractor.hop_length)


def special_tokens_option(tokenizer: Any, text: str, *, plain: bool = False) -> dict[str, bool]:
    """The option by which a processor adds special tokens to a text as its `apply_chat_template` does.

    A chat template of a text model has all of them. That of a multimodal model, such as LLaVA's, may leave the first
    one to the tokenizer.

    Args:
        plain: the text has no chat template.
    """
    if plain:
        return {"add_special_tokens": True}
    bos = getattr(tokenizer, "bos_token", None)
    return {"add_special_tokens": False} if bos and text.startswith(bos) else {}


class RecordingTokenizer:
    """A tokenizer that keeps the text it was called with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def videos_as_images(inputs: dict[str, torch.Tensor], kinds: Sequence[str]) -> dict[str, torch.Tensor]:
    """The frames of videos as images, in the order of the text; `kinds` are those of its media.

    A model that marks both with one token takes either images or videos in a batch, and computes the same features.
    """
    left = {name: value for name, value in inputs.items() if name not in ("pixel_values_videos", "video_grid_thw")}
    parts: dict[str, Iterator[tuple[torch.Tensor, torch.Tensor]]] = {}
    for kind, pixels in {"image": "pixel_values", "video": "pixel_values_videos"}.items():
        grid = inputs.get(f"{kind}_grid_thw")
        if grid is not None:
            frames = [torch.tensor([[1, h, w]] * t) for t, h, w in grid.tolist()]
            parts[kind] = zip(inputs[pixels].split(grid.prod(-1).tolist()), frames, strict=True)
    ordered = [next(parts[kind]) for kind in kinds if kind in parts]
    patches, grids = zip(*ordered, strict=True)
    if (types := left.get("mm_token_type_ids")) is not None:
        left["mm_token_type_ids"] = types.clamp(max=_TYPE_OF_IMAGE)
    return {**left, "pixel_values": torch.cat(patches), "image_grid_thw": torch.cat(grids)}
