"""Band-limited resampling of audio with the FFT."""

from __future__ import annotations

import itertools
import math

import numpy as np


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """`samples` [n] at `rate`, with silence after them, at the rate `wanted`: float32 [round(n * wanted / rate)]."""
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
