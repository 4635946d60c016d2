"""Every format: what comes back is what went in, whole or in pieces."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest

from omnistage.api.audio_encode import (
    AUDIO_FORMATS,
    AudioEncoder,
    AudioFormat,
    encode_audio,
    encoded_rate_hz,
)
from omnistage.api.time_stretch import TimeStretch
from omnistage.contracts.errors import InternalError, InvalidRequestError
from tests.api.sounds import RATE_HZ, best_correlation, chirp, decoded

EXACT = ("wav", "flac", "pcm")
PADDED_SAMPLES = 4 * 1152
"""What mp3 and aac may put around a sound."""


def in_pieces(samples: np.ndarray, audio_format: AudioFormat, count: int = 17) -> list[bytes]:
    encoder = AudioEncoder(audio_format, RATE_HZ)
    return [encoder.push(piece) for piece in np.array_split(samples, count)] + [encoder.finish()]


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
def test_a_whole_file_decodes_to_its_samples(audio_format: AudioFormat) -> None:
    samples = chirp()
    assert np.sqrt(np.mean(samples**2)) > 0.25
    sound = decoded(encode_audio(samples, RATE_HZ, audio_format), audio_format)
    assert best_correlation(sound, samples) > 0.999
    if audio_format in EXACT:
        np.testing.assert_allclose(sound, samples, atol=1.6 / 32_768)
    else:
        assert abs(len(sound) - len(samples)) <= PADDED_SAMPLES


def test_the_measure_of_likeness_can_fail() -> None:
    assert best_correlation(chirp()[::-1].copy(), chirp()) < 0.9


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
def test_pieces_make_the_same_file_however_they_are_cut(audio_format: AudioFormat) -> None:
    samples = chirp()
    files = {b"".join(in_pieces(samples, audio_format, count)) for count in (1, 3, 17)}
    assert len(files) == 1
    streamed = decoded(files.pop(), audio_format)
    whole = decoded(encode_audio(samples, RATE_HZ, audio_format), audio_format)
    if audio_format in EXACT:
        np.testing.assert_array_equal(streamed, whole)
    else:
        assert best_correlation(streamed, whole) > 0.9999


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
def test_sound_leaves_before_the_end(audio_format: AudioFormat) -> None:
    """The first tenth of a second brings some already: FLAC's blocks are the longest."""
    pieces = in_pieces(chirp(), audio_format, 10)
    assert len(pieces[0]) > 44
    assert len(b"".join(pieces[:5])) > len(b"".join(pieces)) // 4


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
@pytest.mark.parametrize("rate_hz", [16_000, 44_100])
def test_other_rates_keep_pitch_and_length(audio_format: AudioFormat, rate_hz: int) -> None:
    samples = chirp(rate_hz=rate_hz)
    sound = decoded(encode_audio(samples, rate_hz, audio_format), audio_format)
    assert best_correlation(sound, chirp()) > 0.99
    assert abs(len(sound) - RATE_HZ) <= PADDED_SAMPLES
    assert encoded_rate_hz("opus", 44_100) == 48_000


def test_a_wav_says_how_long_it_is_unless_nobody_knows_yet() -> None:
    samples = chirp(0.5)
    with wave.open(io.BytesIO(encode_audio(samples, RATE_HZ, "wav"))) as file:
        assert (file.getnframes(), file.getframerate()) == (len(samples), RATE_HZ)
    streamed = b"".join(in_pieces(samples, "wav"))
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4
    assert len(streamed) == 44 + 2 * len(samples)


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
def test_no_sound_at_all_is_still_a_file(audio_format: AudioFormat) -> None:
    encode_audio(np.zeros(0, np.float32), RATE_HZ, audio_format)
    AudioEncoder(audio_format, RATE_HZ).finish()


def test_loud_samples_are_cut_and_numbers_that_are_none_are_errors() -> None:
    loud = np.array([3.0, -3.0, 0.5], np.float32)
    sound = decoded(encode_audio(loud, RATE_HZ, "pcm"), "pcm")
    np.testing.assert_allclose(sound, [1, -1, 0.5], atol=1e-4)
    for bad in (np.nan, np.inf):
        with pytest.raises(InternalError, match="no numbers"):
            AudioEncoder("wav", RATE_HZ).push(np.array([0.0, bad], np.float32))


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0])
def test_speed_changes_length_and_not_pitch(speed: float) -> None:
    times_s = np.arange(2 * RATE_HZ) / RATE_HZ
    tone = (0.4 * np.sin(2 * np.pi * 440 * times_s)).astype(np.float32)
    stretch = TimeStretch(speed, RATE_HZ)
    pieces = [stretch.push(piece) for piece in np.array_split(tone, 13)]
    sound = np.concatenate([*pieces, stretch.finish()])
    assert len(sound) == pytest.approx(len(tone) / speed, rel=0.05)
    peak_hz = np.abs(np.fft.rfft(sound)).argmax() * RATE_HZ / len(sound)
    assert peak_hz == pytest.approx(440, abs=4)
    assert np.sqrt(np.mean(sound**2)) == pytest.approx(np.sqrt(np.mean(tone**2)), rel=0.15)


@pytest.mark.parametrize("speed", [0.2, 4.1, 0.0, -1.0, float("nan")])
def test_a_speed_out_of_range_is_refused(speed: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"0\.25 to 4"):
        TimeStretch(speed, RATE_HZ)


def test_an_unknown_format_is_refused_with_the_known() -> None:
    with pytest.raises(InvalidRequestError, match="wav, pcm, mp3"):
        AudioEncoder("wma", RATE_HZ)  # type: ignore[arg-type]
