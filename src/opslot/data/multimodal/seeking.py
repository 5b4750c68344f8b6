"""Some frames of a video file, decoded from the keyframes before them instead of from the start.

An hour has a hundred thousand frames, of which a model gets a few dozen.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Where seeking decodes more than this share of the frames, all are decoded, which also counts them.
_MOST = 0.5


def selected_frames(
    container: Any, stream: Any, select: Callable[[int], Sequence[int]], convert: Callable[[Any], Any]
) -> tuple[list[Any], Sequence[int], int]:
    """Frames of a PyAV stream.

    Args:
        select: from the number of frames to the sorted numbers of those that are needed.
        convert: is called with each of them, before the next one is decoded.

    Returns:
        What `convert` returned, the numbers of the frames, and the number of all frames.
    """
    # A packet is a frame, with few exceptions, and is counted without being decoded.
    packets = [(packet.pts, packet.is_keyframe) for packet in container.demux(stream) if packet.size > 0]
    total, decoded = len(packets), None
    if total and all(time is not None for time, _ in packets):
        times = sorted(time for time, _ in packets)
        indices = select(total)
        found = _from_keyframes(
            container, stream, times, sorted(time for time, is_key in packets if is_key), indices, convert
        )
        if found is not None:
            return found, indices, total
    while total != decoded:
        total = total if decoded is None else decoded
        indices = select(total)
        container.seek(0)
        wanted, frames, decoded = set(indices), [], 0
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                frames.append(convert(frame))
            decoded = number + 1
    return frames, indices, total


def _from_keyframes(
    container: Any,
    stream: Any,
    times: list[int],
    keys: list[int],
    indices: Sequence[int],
    convert: Callable[[Any], Any],
) -> list[Any] | None:
    """The frames with numbers `indices`, each decoded from the last keyframe before it; None where this does not decode
    fewer frames, or where the file has other frames than its packets say.

    Args:
        times: of all frames, in their order.
        keys: those of keyframes.
    """
    # The keyframe to start from, or None to continue behind the last frame.
    starts: list[int | None] = []
    cost, last = 0, -1
    for index in indices:
        key = bisect.bisect_right(keys, times[index]) - 1
        number = bisect.bisect_left(times, keys[key]) if key >= 0 else -1
        starts.append(keys[key] if number > last else None)
        cost += index - max(number - 1, last)
        last = index
    if len(set(times)) < len(times) or cost > _MOST * len(times):
        return None
    found = []
    frames: Any = iter(())
    for index, start in zip(indices, starts, strict=True):
        if start is not None:
            container.seek(start, stream=stream)
            frames = container.decode(stream)
        frame = _at(frames, times[index])
        if frame is None:
            return None
        found.append(convert(frame))
    return found


def _at(frames: Iterator[Any], time: int) -> Any:
    """The frame of that time; None where there is none."""
    return next(
        (frame if frame.pts == time else None for frame in frames if frame.pts is None or frame.pts >= time), None
    )
