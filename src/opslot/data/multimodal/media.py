"""Images and videos of a sample: from a path, bytes, base64, a PIL image or an array to what processors take."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from opslot._base.errors import DataError
from opslot._base.hub import downloaded
from opslot.data.encoder import SampleError
from opslot.data.multimodal.containers import missing_bytes
from opslot.data.multimodal.seeking import selected_frames

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("image", "video", "audio")
# Characters of a path in an error; base64 text in its place may be long.
_LONGEST_SHOWN = 200
# How far values of an image are clipped, of 255; others are an error.
_BEYOND = 32
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# Formats of animations, which may have a single frame.
_ANIMATED = ("GIF", "WEBP")
# Keys of a source, in the order in which they are looked for.
SOURCE_KEYS = ("bytes", "base64", "array", "frames", "path", "url", "file")


@dataclass(frozen=True)
class Limits:
    """Bounds of the memory that decoding takes.

    Attributes:
        max_pixels: larger images and frames are scaled down to at most this many pixels; None keeps their size.
        max_frames: longer videos are sampled uniformly to this many frames.
        max_fps: videos are sampled to at most this many frames per second, or to two frames, where their own rate is
            known; None for all.
    """

    max_pixels: int | None = None
    max_frames: int = 64
    max_fps: float | None = None


@dataclass(frozen=True)
class Video:
    """Decoded frames, uint8 [frames, height, width, 3], and what timestamps are computed from.

    Attributes:
        indices: number of each frame in the original video, which has `total` frames at `fps` frames per second.
    """

    frames: np.ndarray
    indices: list[int]
    total: int
    fps: float

    @property
    def sampled_fps(self) -> float:
        """Mean rate of the frames per second of the original video."""
        return len(self.indices) * self.fps / self.total


def load_image(source: Any, folder: Path, limits: Limits) -> Image:
    """An RGB image, upright as its EXIF orientation says.

    Raises:
        SampleError: a missing file, or one that does not decode.
    """
    from PIL import Image, UnidentifiedImageError

    value = value_of(source)
    if isinstance(value, Image.Image):
        image = value
    elif isinstance(value, np.ndarray | list):
        image = Image.fromarray(_pixels(value, (2, 3), "an image"))
    else:
        try:
            image = Image.open(io.BytesIO(read_source(source, folder)))
            if limits.max_pixels is not None and image.width * image.height > limits.max_pixels:
                # JPEG decodes at a reduced size, which bounds the memory of huge images.
                image.draft("RGB", _scaled(image.size, limits.max_pixels))
            image.load()
        except (SampleError, DataError):
            raise
        except UnidentifiedImageError as error:
            raise SampleError(f"the image {describe(source)} does not decode (unknown format)") from error
        # PIL raises many types for damaged files.
        except Exception as error:
            raise SampleError(f"the image {describe(source)} does not decode ({error})") from error
    image = _rgb(image)
    if limits.max_pixels is not None and image.width * image.height > limits.max_pixels:
        image = image.resize(_scaled(image.size, limits.max_pixels), Image.Resampling.BICUBIC)
    return image


def _rgb(image: Image) -> Image:
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":
        # Pillow clips values of 16 bits to 255, and truncates floats up to 1.
        image = Image.fromarray(_of_depth(np.asarray(image)))
    return image if image.mode == "RGB" else image.convert("RGB")


def _of_depth(values: np.ndarray) -> np.ndarray:
    """uint8 pixels of gray values: of 16 or 8 bits, or floats up to 1 or 255."""
    if values.dtype.kind == "f":
        # `_pixels` takes floats up to 1.
        values = values if values.max() <= 1 + _BEYOND / 255 else values / 255
    elif values.dtype.itemsize == 2 or 255 + _BEYOND < values.max() < 2**16:
        values = values >> 8
    return _pixels(values, (2,), "an image")


def load_video(source: Any, folder: Path, limits: Limits) -> Video:
    """Uniformly sampled frames of a video file, an animated image, an array or a list of images.

    Raises:
        SampleError: no frames, a file that does not decode, or no installed package that decodes it.
    """
    value = value_of(source)
    fps = rate_of(source, "fps") or 0.0
    if isinstance(value, np.ndarray | list):
        is_array = isinstance(value, np.ndarray) or (bool(value) and isinstance(value[0], list))
        images = _pixels(value, (4,), "a video") if is_array else value
        indices = _sampled(len(images), fps, limits, source)
        frames = [load_image(images[index], folder, limits) for index in indices]
        return _video(frames, indices, len(images), fps)
    if fps:
        raise SampleError(
            f"fps is of frames and arrays, and {describe(source)} is a file; remove it, and set data.max_fps"
        )
    data = read_source(source, folder)
    return _decode_animation(data, source, limits) or _decode_video(data, source, limits)


def rate_of(source: Any, name: str) -> float | None:
    """Frames or samples per second that a source gives; None where it gives none, or 0."""
    value = source.get(name) if isinstance(source, Mapping) else None
    try:
        rate = float(value or 0)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise SampleError(f"{name} is not a positive number: {value!r}")
    return rate or None


def describe(source: Any) -> str:
    """A short name of a source, for errors."""
    if isinstance(source, Mapping) and isinstance(source.get("path"), str) and source.get("bytes") is not None:
        return f"{source['path']} (in the record)"
    value = value_of(source)
    if isinstance(value, str) and not value.startswith("data:") and len(value) < _LONGEST_SHOWN:
        return value
    return f"in the record (a {type(value).__name__})"


def to_bytes(value: Any) -> bytes:
    """JSON, and after it the bytes, arrays and PIL images that are in it, as one byte string."""
    blobs: list[bytes] = []

    def store(item: Any) -> dict[str, Any]:
        kind, blob = _blob(item)
        start = sum(map(len, blobs))
        blobs.append(blob)
        return {"__blob__": [kind, start, start + len(blob)]}

    header = json.dumps(value, default=store).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *blobs])


def _blob(item: Any) -> tuple[str, bytes]:
    if isinstance(item, bytes | bytearray | memoryview):
        return "bytes", bytes(item)
    stream = io.BytesIO()
    if isinstance(item, np.ndarray):
        np.save(stream, item, allow_pickle=False)
        return "npy", stream.getvalue()
    if not hasattr(item, "save"):
        raise SampleError(f"a {type(item).__name__} is not an image, video or audio")
    _rgb(item).save(stream, "PNG")
    return "bytes", stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """The inverse of `to_bytes`."""
    size = 8 + int.from_bytes(data[:8], "little")

    def load(item: dict[str, Any]) -> Any:
        if "__blob__" not in item:
            return item
        kind, start, stop = item["__blob__"]
        blob = data[size + start : size + stop]
        return blob if kind == "bytes" else np.load(io.BytesIO(blob), allow_pickle=False)

    return json.loads(data[8:size], object_hook=load)


def value_of(source: Any) -> Any:
    """What a source consists of: a mapping's first known key that is set, which may hold another source."""
    if isinstance(source, Mapping):
        key = next((key for key in SOURCE_KEYS if source.get(key) is not None), None)
        if key is None:
            has = ", ".join(map(str, source)) or "nothing"
            # MiniCPM-V's numbered images.
            is_named = any(str(name).startswith("<") for name in source)
            fix = "; give a list of sources, and <image> in the text for each" if is_named else ""
            raise SampleError(f"a source has none of {', '.join(SOURCE_KEYS)}; it has {has}{fix}")
        if key == "base64" and not str(source[key]).startswith("data:"):
            return f"data:;base64,{source[key]}"
        # A member of a tar file, in place of its name.
        return value_of(source[key])
    return source


def read_source(source: Any, folder: Path) -> bytes:
    """The bytes of a file, of a data URI or in the record.

    Raises:
        SampleError: a file that cannot be read or is cut off, or no bytes.
    """
    data = _bytes_of(value_of(source), folder)
    if not data:
        raise SampleError(f"{describe(source)} is empty (0 bytes)")
    if missing := missing_bytes(data):
        raise SampleError(
            f"{describe(source)} is cut off: it has {len(data)} bytes, of at least {len(data) + missing} in its header"
        )
    return data


def _bytes_of(value: Any, folder: Path) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise SampleError(f"{value!r:.40} ({type(value).__name__}) is not a path, bytes or base64")
    if not value:
        raise SampleError("its path is empty")
    if value.startswith("data:"):
        try:
            # Encoders break lines.
            return base64.b64decode("".join(value.partition(",")[2].split()), validate=True)
        except binascii.Error as error:
            raise SampleError(f"not base64: {error}") from error
    shown = value if len(value) < _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}..."
    shown = shown.encode(errors="backslashreplace").decode()
    if _URL.match(value) and not value.startswith("file://"):
        raise SampleError(f"{shown} is not downloaded; store the file and give its path")
    try:
        return downloaded(_path(value, folder)).read_bytes()
    except DataError:
        # The file may be fine, so its sample must not be left out.
        raise
    # ValueError: a null byte. RuntimeError: no home directory.
    except (OSError, ValueError, RuntimeError) as error:
        hint = "" if len(value) < _LONGEST_SHOWN else '; give base64 text as {"base64": ...} or a data: URI'
        reason = "not Unicode" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or error
        start = f"relative paths start at {folder} (data.media_dir)"
        raise SampleError(f"{shown} cannot be read ({reason}); {start}{hint}") from error


def _path(value: str, folder: Path) -> Path:
    """The path in a file URL, whose characters may be percent-encoded, or `value`; relative to `folder`."""
    path = folder / Path(value.removeprefix("file://").removeprefix("localhost")).expanduser()
    is_encoded = value.startswith("file://") and "%" in value and not path.exists()
    return Path(unquote(str(path))) if is_encoded else path


def _pixels(value: Any, dimensions: tuple[int, ...], what: str) -> np.ndarray:
    """uint8 pixels of integers up to 255 or floats up to 1."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SampleError(f"the array of {what} is not rectangular ({error})") from error
    # No frames are an error of their own.
    no_size = 0 in (array.shape[1:] if array.ndim == 4 else array.shape)
    if array.ndim not in dimensions or no_size or array.dtype.kind not in "uif":
        raise SampleError(f"an array of shape {list(array.shape)} and dtype {array.dtype} is not {what}")
    if array.ndim > 2 and array.shape[-1] not in (1, 3, 4) and array.shape[-3] in (1, 3, 4):
        array = np.moveaxis(array, -3, -1)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise SampleError(f"the array of {what} has values that are not finite")
        array = array * 255.0
    # Floats of a resized image may be out of range by a little.
    if array.dtype != np.uint8 and array.size and (array.min() < -_BEYOND or array.max() > 255 + _BEYOND):
        scale = 255 if array.dtype.kind == "f" else 1
        raise SampleError(
            f"the array of {what} has values from {array.min() / scale:.4g} to {array.max() / scale:.4g}; integers are "
            "from 0 to 255, floats from 0 to 1"
        )
    if array.dtype != np.uint8:
        array = array.clip(0, 255).astype(np.uint8)
    return array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def _scaled(size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    scale = math.sqrt(max_pixels / (size[0] * size[1]))
    width, height = (int(side * scale) for side in size)
    if width and height:
        return width, height
    # Of an image that is much longer than wide, one side is one pixel.
    return (1, max_pixels) if not width else (max_pixels, 1)


def _sampled(count: int, fps: float, limits: Limits, source: Any) -> list[int]:
    """Numbers of those of `count` frames, at `fps` per second or 0, that are read: evenly spaced."""
    if count == 0:
        raise SampleError(f"the video {describe(source)} has no frames")
    most = limits.max_frames
    if limits.max_fps is not None and fps:
        # Models merge pairs of frames.
        most = min(most, max(2, round(count * limits.max_fps / fps)))
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def _video(frames: list[Image], indices: list[int], total: int, fps: float) -> Video:
    if len({frame.size for frame in frames}) > 1:
        frames = [frame.resize(frames[0].size) for frame in frames]
    return Video(np.stack([np.asarray(frame) for frame in frames]), indices, total, fps or 24.0)


def _decoded_frame(frame: Image | np.ndarray, limits: Limits) -> Image:
    """A frame of a video within the limits; it has no path, so no folder."""
    return load_image(frame, Path(), limits)


def _decode_animation(data: bytes, source: Any, limits: Limits) -> Video | None:
    """The frames of a GIF, WebP or APNG; None for another file."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data))
        total = getattr(image, "n_frames", 1)
        if total == 1 and image.format not in _ANIMATED:
            raise SampleError(
                f"the video {describe(source)} is a still image ({image.format}); give it as an image, or as the "
                "frames of a video"
            )
        fps = 1000 / np.mean([_duration(image, number) for number in range(total)]).item()
        indices = _sampled(total, fps, limits, source)
        frames = []
        for index in indices:
            image.seek(index)
            frames.append(_decoded_frame(image.copy(), limits))
    except UnidentifiedImageError:
        return None
    except SampleError:
        raise
    except Exception as error:
        raise SampleError(f"the video {describe(source)} does not decode ({error})") from error
    return _video(frames, indices, total, fps)


def _duration(image: Image, number: int) -> float:
    """Milliseconds for which a frame of an animation is shown."""
    image.seek(number)
    # Those of WebP and AVIF are known after that.
    image.load()
    return image.info.get("duration") or 42


def _decode_video(data: bytes, source: Any, limits: Limits) -> Video:
    decode = _decode_with_av if torchcodec_decoders() is None else _decode_with_torchcodec
    try:
        return decode(data, source, limits)
    except SampleError:
        raise
    except Exception as error:
        # PyAV's text also has the number of the error and the name of the stream.
        reason = getattr(error, "strerror", None) or error
        raise SampleError(f"the video {describe(source)} does not decode ({reason})") from error


def torchcodec_decoders() -> Any:
    """`torchcodec.decoders`; None where it, or the FFmpeg libraries that it needs, are not installed."""
    try:
        from torchcodec import decoders
    # It raises RuntimeError or OSError without FFmpeg.
    except Exception:
        return None
    return decoders


def _decode_with_torchcodec(data: bytes, source: Any, limits: Limits) -> Video:
    decoder = torchcodec_decoders().VideoDecoder(data)
    total, fps = len(decoder), float(decoder.metadata.average_fps or 0)
    indices = _sampled(total, fps, limits, source)
    pixels = (decoder.get_frame_at(index).data.permute(1, 2, 0).numpy() for index in indices)
    frames = [_decoded_frame(frame, limits) for frame in pixels]
    return _video(frames, indices, total, fps)


def _decode_with_av(data: bytes, source: Any, limits: Limits) -> Video:
    with av_package(source).open(io.BytesIO(data)) as container:
        if not container.streams.video:
            raise SampleError(f"{describe(source)} has no video stream")
        stream = container.streams.video[0]
        fps = float(stream.average_rate or 0)
        frames, indices, total = selected_frames(
            container,
            stream,
            lambda count: _sampled(count, fps, limits, source),
            lambda frame: _decoded_frame(_upright(frame), limits),
        )
    return _video(frames, [*indices], total, fps)


def _upright(frame: Any) -> np.ndarray | Image:
    """A PyAV frame, turned as the header of its track says."""
    if frame.rotation % 90:
        return frame.to_image().rotate(frame.rotation, expand=True)
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90))


def av_package(source: Any) -> Any:
    try:
        import av
    except ImportError as error:
        raise SampleError(
            f"the video {describe(source)} needs PyAV or torchcodec to decode it; pip install av, or give its frames "
            "as images"
        ) from error
    return av


def is_animation(data: bytes) -> bool:
    from PIL import Image, UnidentifiedImageError

    try:
        Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        return False
    return True
