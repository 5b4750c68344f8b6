"""The media of a sample, decoded as a checkpoint's processor takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from opslot._base.device import has_package
from opslot._base.errors import ConfigError
from opslot._base.hub import DATASETS, data_folder
from opslot.data.encoder import SampleError
from opslot.data.multimodal.audio import load_audio, load_audio_track
from opslot.data.multimodal.media import KINDS, Limits, load_image, load_video
from opslot.data.multimodal.processor_call import source_has

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# The part of a processor that each kind of media needs; some have another name in some releases.
_COMPONENTS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}


class Loaded(NamedTuple):
    """Decoded media of a sample.

    Attributes:
        media: images, videos and audio, by kind, in their order in the text.
        tracks: for each audio, the number of the video that it is the track of; None for a file of audio.
    """

    media: dict[str, list[Any]]
    tracks: list[int | None]

    @property
    def model_options(self) -> dict[str, Any]:
        """What a model computes positions by, beside the processor's outputs."""
        return {"use_audio_in_video": True} if any(track is not None for track in self.tracks) else {}


def _folder(media_dir: str) -> Path:
    if media_dir.startswith(DATASETS):
        return data_folder(media_dir)
    folder = Path(media_dir).absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"data.media_dir: {folder} is not a folder",
            hint="name the folder where the paths of the data start, or leave it out",
        )
    return folder


class MediaLoader:
    """Decodes the images, videos and audio of samples.

    Args:
        limits: bounds for decoding.
        use_audio_in_video: read the audio tracks of videos too, as the processors of omni models take them.
        media_dir: where relative paths start, a folder or one of a data set of the hub; default the folder of the data
            file.

    Raises:
        ConfigError: a media_dir that does not exist, or use_audio_in_video with a processor that does not take it.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        limits: Limits | None = None,
        use_audio_in_video: bool = False,
        media_dir: str | None = None,
    ) -> None:
        self.processor: Any = processor
        self.limits = limits or Limits()
        self.use_audio_in_video = use_audio_in_video
        self.media_dir = None if media_dir is None else _folder(media_dir)
        self._named = media_dir if media_dir and media_dir.startswith(DATASETS) else self.media_dir
        if use_audio_in_video and not source_has(type(processor), "use_audio_in_video"):
            raise ConfigError(
                f"data.use_audio_in_video: {type(processor).__name__} does not take the audio of videos",
                hint="remove the setting, or use an omni model such as qwen3_omni_moe",
            )

    def identity(self) -> dict[str, Any]:
        """The settings that samples depend on: both limits of size, and of the others those that are set."""
        optional = {
            "data.max_fps": self.limits.max_fps,
            "data.use_audio_in_video": self.use_audio_in_video or None,
            "data.media_dir": self._named and str(self._named),
        }
        return {
            "data.max_pixels": self.limits.max_pixels,
            "data.max_frames": self.limits.max_frames,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def folder_of(self, file: Path) -> Path:
        """Where relative paths in a data file start."""
        return self.media_dir or file.absolute().parent

    def component(self, kind: str) -> Any:
        """The part of the processor for a kind of media, or None."""
        parts = (getattr(self.processor, name, None) for name in _COMPONENTS[kind])
        return next((part for part in parts if part is not None), None)

    def load(self, given: Sequence[tuple[str, Any]], folder: Path) -> Loaded:
        """Decode media, given as (kind, source), whose relative paths start in a folder.

        Raises:
            SampleError: a kind that the processor does not take, media that cannot be read, or videos of which only
                some have an audio track.
        """
        loaded = Loaded({kind: [] for kind in KINDS}, [])
        are_silent = set()
        for kind, source in given:
            self._check_kind(kind)
            if kind == "audio":
                loaded.media[kind].append(load_audio(source, folder, self.component(kind).sampling_rate))
                loaded.tracks.append(None)
                continue
            load = load_image if kind == "image" else load_video
            loaded.media[kind].append(load(source, folder, self.limits))
            if kind == "video" and self.use_audio_in_video:
                track = load_audio_track(source, folder, self.component("audio").sampling_rate)
                are_silent.add(track is None)
                if track is not None:
                    # In the order of the text, as other audio.
                    loaded.media["audio"].append(track)
                    loaded.tracks.append(len(loaded.media["video"]) - 1)
        if len(are_silent) > 1:
            raise SampleError(
                "some of its videos have an audio track and others have none; set data.use_audio_in_video: false, or "
                "split the sample"
            )
        return loaded

    def _check_kind(self, kind: str) -> None:
        if self.component(kind) is None:
            lacks = kind == "video" and not has_package("torchvision")
            missing = " without torchvision; pip install torchvision" if lacks else ""
            raise SampleError(f"has {kind}, which {type(self.processor).__name__} cannot process{missing}")
