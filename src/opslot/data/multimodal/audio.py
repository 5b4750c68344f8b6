"""Audio of a sample: from a path, bytes, base64 or an array to samples at the rate of a processor."""

from __future__ import annotations

import io
import itertools
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np

from opslot.data.encoder import SampleError
from opslot.data.multimodal.media import (
    av_package,
    describe,
    is_animation,
    rate_of,
    read_source,
    torchcodec_decoders,
    value_of,
)

# How far floats of audio may be beyond 1, as after a filter.
_LOUDEST = 4.0
# Bytes in the header of a WAV file that was written to a stream, before their number was known.
_STREAMED = 2**31 - 2**16


def load_audio(source: Any, folder: Path, sampling_rate: int) -> np.ndarray:
    """Mono float32 samples [n] at `sampling_rate`.

    An array holds floats up to 1 or 16-bit integers, at the `sampling_rate` that its source gives.

    Raises:
        SampleError: no samples, samples that are not numbers, no rate, or a file that does not decode.
    """
    value = value_of(source)
    if isinstance(value, np.ndarray | list):
        samples = _samples(value)
        rate = round(rate_of(source, "sampling_rate") or 0)
    else:
        samples, rate = _decode_audio(read_source(source, folder), source, sampling_rate)
    if not samples.size:
        raise SampleError(f"the audio {describe(source)} has length zero")
    if not np.isfinite(samples).all():
        raise SampleError(f"the audio {describe(source)} has samples that are not finite")
    if not rate:
        raise SampleError(f"the audio {describe(source)} has no sampling_rate; add it beside the array")
    samples = samples if samples.ndim == 1 else samples.mean(axis=int(np.argmin(samples.shape)))
    return samples if rate == sampling_rate else _resampled(samples, rate, sampling_rate)


def _samples(value: Any) -> np.ndarray:
    """float32 samples of an array."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SampleError(f"the array of an audio is not rectangular ({error})") from error
    if array.ndim not in (1, 2) or array.dtype.kind not in "uif":
        raise SampleError(f"an array of shape {list(array.shape)} and dtype {array.dtype} is not audio")
    limit = _LOUDEST if array.dtype.kind == "f" else 2**15
    if array.size and max(float(array.max()), -float(array.min())) > limit:
        raise SampleError(f"an audio has values up to {np.abs(array).max()}; give 16-bit integers, or floats up to 1")
    return array.astype(np.float32) / np.float32(1 if array.dtype.kind == "f" else 2**15)


def _resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """`samples` [n] at `rate`, with silence after them, at the rate `wanted`: float32 [round(n * wanted / rate)].

    Band-limited, with the FFT.
    """
    count = max(1, round(len(samples) * wanted / rate))
    down, up = rate // math.gcd(rate, wanted), wanted // math.gcd(rate, wanted)
    blocks = _fast_length(-(-len(samples) // down) + 1)
    spectrum = np.fft.rfft(samples, blocks * down)
    kept = min(len(spectrum), blocks * up // 2 + 1)
    return (np.fft.irfft(spectrum[:kept], blocks * up)[:count] * (up / down)).astype(np.float32)


def _fast_length(least: int) -> int:
    """The smallest number from `least` on whose factors are 2, 3 and 5; an FFT of other lengths takes much longer."""
    bounds = [range(math.ceil(math.log(2 * least, base)) + 1) for base in (2, 3, 5)]
    return min(n for i, j, k in itertools.product(*bounds) if (n := 2**i * 3**j * 5**k) >= least)


def load_audio_track(source: Any, folder: Path, sampling_rate: int) -> np.ndarray | None:
    """The audio of a video file, mono float32 [n] at `sampling_rate`; None for a video without.

    Raises:
        SampleError: an audio track that does not decode, or no installed package that decodes it.
    """
    value = value_of(source)
    if isinstance(value, np.ndarray | list):
        return None
    data = read_source(source, folder)
    if is_animation(data):
        return None
    try:
        samples = _track(data, source, sampling_rate)
    except SampleError:
        raise
    except Exception as error:
        raise SampleError(f"the audio track of {describe(source)} does not decode ({error})") from error
    return samples if samples is not None and samples.size else None


def _track(data: bytes, source: Any, sampling_rate: int) -> np.ndarray | None:
    decode = _track_with_av if torchcodec_decoders() is None else _track_with_torchcodec
    return decode(data, source, sampling_rate)


def _track_with_torchcodec(data: bytes, source: Any, sampling_rate: int) -> np.ndarray | None:
    try:
        decoder = torchcodec_decoders().AudioDecoder(data, sample_rate=sampling_rate)
    # What it raises where the file has no audio stream.
    except (ValueError, RuntimeError):
        return None
    return np.asarray(decoder.get_all_samples().data.numpy(), dtype=np.float32).mean(0)


def _track_with_av(data: bytes, source: Any, sampling_rate: int) -> np.ndarray | None:
    av = av_package(source)
    with av.open(io.BytesIO(data)) as container:
        if not container.streams.audio:
            return None
        # Its layout "mono" would make two channels 1.4 times as loud as their mean.
        resampler = av.AudioResampler(format="fltp", rate=sampling_rate)
        frames = [part for frame in container.decode(container.streams.audio[0]) for part in resampler.resample(frame)]
        parts = [part.to_ndarray().mean(0) for part in [*frames, *resampler.resample(None)]]
    return np.concatenate(parts).astype(np.float32) if parts else None


def _decode_audio(data: bytes, source: Any, sampling_rate: int) -> tuple[np.ndarray, int]:
    """Samples [n, channels] and their rate: PCM WAV by Python itself, other formats by soundfile, and those that it
    does not know, such as AAC, as the audio track of a video, at `sampling_rate`.
    """
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames = file.getnframes()
            raw = file.readframes(frames)
        found = len(raw) // (width * channels)
        if found < frames and frames * width * channels < _STREAMED:
            raise SampleError(f"the audio {describe(source)} is truncated after {found / rate:.3f} s")
        if width == 2:
            return np.frombuffer(raw, "<i2").reshape(-1, channels) / np.float32(2**15), rate
    except (wave.Error, EOFError):
        pass
    try:
        import soundfile

        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except Exception as error:
        hint, track = "", None
        try:
            track = _track(data, source, sampling_rate)
        except SampleError:
            hint = "; formats that soundfile does not know, such as AAC, need PyAV or torchcodec"
        except Exception:  # of PyAV, for what is not audio
            pass
        if track is not None:
            return track, sampling_rate
        if isinstance(error, ImportError):
            raise SampleError(
                f"the audio {describe(source)} is not a 16-bit PCM WAV file, and soundfile is not installed; "
                "pip install soundfile"
            ) from error
        # Without the name of the stream that it was read from.
        reason = getattr(error, "error_string", error)
        raise SampleError(f"the audio {describe(source)} does not decode ({reason}){hint}") from error
    return samples, int(rate)
