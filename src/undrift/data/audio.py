"""One second of sound as a spectrogram: 40 mel bands × 64 frames, in decibels."""

from __future__ import annotations

import io
import wave

import numpy as np
import torch
from torch import Tensor

BANDS, FRAMES, WINDOW, RANGE = 40, 64, 512, 80.0


def spectrogram(data: bytes) -> np.ndarray:
    """Return the first second of a WAV file, as uint8: 255 is its loudest value, 0 is 80 dB or more below that."""
    with wave.open(io.BytesIO(data)) as file:
        rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
        if not 1000 <= rate <= 384_000:  # one second is read, so the rate bounds the memory
            raise ValueError(f"it has {rate:,} samples per second, and 1,000 to 384,000 are supported")
        if width != 2:
            raise ValueError(f"it has {8 * width}-bit samples, and only 16-bit ones are supported")
        samples = np.frombuffer(file.readframes(rate), "<i2").reshape(-1, channels).mean(1) / 32768
    sound = torch.zeros(rate)
    sound[: len(samples)] = torch.from_numpy(samples)
    hop = rate // FRAMES
    spectrum = torch.stft(sound, WINDOW, hop, window=torch.hann_window(WINDOW), return_complex=True).abs().square()
    power = (mel_bands(rate) @ spectrum)[:, :FRAMES]
    decibels = 10 * torch.log10(power.clamp(min=1e-10))
    scaled = (decibels - decibels.max() + RANGE).clamp(min=0) / RANGE * 255
    return scaled.round().to(torch.uint8).numpy()[None]


def mel_bands(rate: int) -> Tensor:
    """Return triangular filters with equidistant corners in mel, `2595·log₁₀(1 + f/700)`, as bands × frequencies."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    corners = torch.from_numpy(700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1))
    frequency = torch.linspace(0, rate / 2, WINDOW // 2 + 1, dtype=torch.float64)
    low, middle, high = (corners[i : i + BANDS, None] for i in range(3))
    return torch.minimum((frequency - low) / (middle - low), (high - frequency) / (high - middle)).clamp(min=0).float()
