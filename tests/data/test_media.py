"""Images, videos and audio of samples: what each form of source gives, and what is wrong with it."""

import base64
import io
import struct
import wave

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import image_utils

from opslot._base.errors import DataError
from opslot._base.hub import data_folder
from opslot.data.encoder import SampleError
from opslot.data.multimodal import audio, media, seeking
from opslot.data.multimodal.audio import _fast_length, load_audio, load_audio_track
from opslot.data.multimodal.containers import missing_bytes
from opslot.data.multimodal.media import (
    Limits,
    from_bytes,
    load_image,
    load_video,
    to_bytes,
)
from tests.multimodal import draw


def test_16_bit_images_are_scaled_to_8_bits(tmp_path):
    values = (np.arange(16, dtype=np.uint16) * 4369).reshape(4, 4)
    Image.fromarray(values).save(tmp_path / "1.png")
    pixels = np.asarray(load_image("1.png", tmp_path, Limits()))
    np.testing.assert_array_equal(pixels, np.repeat((values >> 8)[..., None], 3, -1))


@pytest.mark.parametrize("scale", [np.int32(257), np.float32(1), np.float32(1 / 255)], ids=["I", "F", "F up to 1"])
def test_values_of_gray_images_are_those_of_8_bits(scale, tmp_path):
    """In Pillow's modes I, of TIFF files and older 16-bit PNG, and F."""
    values = np.arange(0, 256, 17).reshape(4, 4)
    Image.fromarray((values * scale).astype(scale.dtype)).save(tmp_path / "1.tif")
    pixels = np.asarray(load_image("1.tif", tmp_path, Limits()))
    np.testing.assert_allclose(pixels, np.repeat(values[..., None], 3, -1), atol=1)


def test_array_of_an_image_without_pixels_raises(tmp_path):
    with pytest.raises(SampleError, match=r"shape \[0, 4, 3\] and dtype uint8 is not an image"):
        load_image({"array": np.zeros((0, 4, 3), np.uint8)}, tmp_path, Limits())


@pytest.mark.parametrize("load", [load_image, load_video, lambda source, folder, _: load_audio(source, folder, 16000)])
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("a\0.png", "cannot be read .*null byte"),
        ("~nobody-of-that-name/1.png", "cannot be read .*home directory"),
        ("\ud800.png", r"^\\ud800.png cannot be read \(not Unicode\)"),
        ("s3://bucket/1.png", "s3://bucket/1.png is not downloaded"),
        ("file:///gone%201.png", "cannot be read .No such file"),
    ],
)
def test_paths_that_are_not_files_raise(load, source, problem, tmp_path):
    with pytest.raises(SampleError, match=problem):
        load(source, tmp_path, Limits())


@pytest.mark.parametrize("load", [load_image, load_video, lambda source, folder, _: load_audio(source, folder, 16000)])
@pytest.mark.parametrize(
    "source", ["a.bin", {"bytes": b"", "path": "a.bin"}, {"base64": ""}], ids=["file", "bytes", ""]
)
def test_empty_sources_raise(load, source, tmp_path):
    (tmp_path / "a.bin").touch()
    with pytest.raises(SampleError, match=r"(a\.bin|in the record).* is empty \(0 bytes\)"):
        load(source, tmp_path, Limits())


def test_file_url(tmp_path):
    folder = tmp_path / "a b"
    file = draw(folder / "50%.png", 1)
    assert "%20" in file.as_uri()
    for url in (file.as_uri(), f"file://{file}", file.as_uri().replace("file://", "file://localhost")):
        assert load_image(url, tmp_path, Limits()).size == load_image(str(file), tmp_path, Limits()).size


def test_long_sources_are_cut_in_errors(tmp_path):
    with pytest.raises(SampleError, match=r"give base64 text as") as caught:
        load_image("iVBORw0KGgo" * 30, tmp_path, Limits())
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation, tmp_path):
    """As Transformers' load_image, with which a checkpoint's processor loads images for generation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(draw(tmp_path / "1.png", 1)).save(tmp_path / "1.jpg", exif=exif)
    found = np.asarray(load_image("1.jpg", tmp_path, Limits()))
    np.testing.assert_array_equal(found, np.asarray(image_utils.load_image(str(tmp_path / "1.jpg"))))


@pytest.mark.parametrize("form", ["data:image/png;base64,{}", {"base64": "{}"}, {"base64": "data:image/png;base64,{}"}])
def test_base64_in_lines(form, tmp_path):
    text = base64.encodebytes(draw(tmp_path / "1.png", 1).read_bytes()).decode()
    source = form.format(text) if isinstance(form, str) else {"base64": form["base64"].format(text)}
    assert load_image(source, tmp_path, Limits()).size == load_image("1.png", tmp_path, Limits()).size


@pytest.mark.parametrize(
    "values", [np.full((4, 4, 3), 200.0), np.full((4, 4, 3), 4000, np.uint16), np.full((4, 4), -1.0)]
)
def test_pixels_out_of_range_raise(values, tmp_path):
    with pytest.raises(SampleError, match="integers are from 0 to 255, floats from 0 to 1"):
        load_image({"array": values}, tmp_path, Limits())


def test_max_pixels(tmp_path):
    Image.new("RGB", (400, 200)).save(tmp_path / "1.png")
    image = load_image("1.png", tmp_path, Limits(max_pixels=5000))
    assert image.width * image.height <= 5000
    assert image.width / image.height == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("key", ["url", "path"])
def test_member_of_a_tar_file_in_place_of_its_name(key, tmp_path):
    """As {"type": "image_url", "image_url": {"url": "1.png"}} is read from a tar file."""
    stream = io.BytesIO()
    Image.new("RGB", (2, 3)).save(stream, "PNG")
    source = {key: {"bytes": stream.getvalue(), "path": "1.png"}, "detail": "high"}
    assert load_image(source, tmp_path, Limits()).size == (2, 3)


def test_bytes_round_trip():
    value = {"media": [["image", {"bytes": b"ab"}], ["video", {"frames": ["a", b"c"], "fps": 2.0}]], "text": "é"}
    assert from_bytes(to_bytes(value)) == value
    array = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(from_bytes(to_bytes([array]))[0], array)


def test_video_of_frames(tmp_path):
    names = [draw(tmp_path / f"{number}.png", 6 * number).name for number in range(10)]
    video = load_video({"frames": names, "fps": 5}, tmp_path, Limits(max_frames=4))
    assert video.frames.shape == (4, 32, 32, 3)
    assert (video.indices, video.total, video.fps) == ([0, 3, 6, 9], 10, 5.0)
    frames = [Image.open(tmp_path / name) for name in names]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100)
    assert load_video("a.gif", tmp_path, Limits(max_frames=4)).fps == 10.0
    with pytest.raises(SampleError, match="has no frames"):
        load_video({"frames": []}, tmp_path, Limits())
    with pytest.raises(SampleError, match="has no frames"):
        load_video(np.zeros((0, 8, 8, 3), dtype=np.uint8), tmp_path, Limits())


def wav(samples, rate):
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return stream.getvalue()


def test_audio(tmp_path):
    time = np.arange(8000) / 8000
    tone = np.sin(2 * np.pi * 440 * time)
    samples = load_audio(wav(tone, 8000), tmp_path, 16000)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert len(samples) == 16000
    np.testing.assert_allclose(samples[100:-100], expected[100:-100], atol=2e-3)
    with pytest.raises(SampleError, match="has length zero"):
        load_audio(wav(tone[:0], 8000), tmp_path, 16000)
    with pytest.raises(SampleError, match="has length zero"):
        load_audio([], tmp_path, 16000)


def test_resampled_samples_are_at_their_times(tmp_path):
    """Also at the ends, and where the length is not a multiple of the ratio of the rates."""
    rate, wanted, count = 44_100, 16_000, 44_100 + 400
    # Zero at both ends.
    window = np.sin(np.pi * np.arange(count) / count) ** 2
    tone = window * np.sin(2 * np.pi * 3000 * np.arange(count) / rate)
    times = np.arange(round(count * wanted / rate)) / wanted
    expected = np.sin(np.pi * times * rate / count) ** 2 * np.sin(2 * np.pi * 3000 * times)
    samples = load_audio({"array": tone, "sampling_rate": rate}, tmp_path, wanted)
    np.testing.assert_allclose(samples, expected, atol=1e-3)
    # Of the frames after an array's end, none is its first.
    step = load_audio({"array": [0.0] * 900 + [0.5] * 100, "sampling_rate": 8_000}, tmp_path, wanted)
    assert np.abs(step[:50]).max() < 0.01


def test_length_of_resampling_is_fast():
    for least in (1, 7, 26_460_007 // 441):
        length = _fast_length(least)
        assert least <= length <= 2 * least
        for factor in (2, 3, 5):
            while length % factor == 0:
                length //= factor
        assert length == 1


class FakeDecoders:
    """`torchcodec.decoders` for a video of 10 frames with a ramp as audio."""

    class VideoDecoder:
        metadata = type("Metadata", (), {"average_fps": 5.0})

        def __init__(self, data):
            assert data == b"video"

        def __len__(self):
            return 10

        def get_frame_at(self, index):
            return type("Frame", (), {"data": torch.full((3, 4, 6), index, dtype=torch.uint8)})

    class AudioDecoder:
        def __init__(self, data, sample_rate):
            assert data == b"video"
            ramp = torch.arange(sample_rate // 1000.0)
            self.samples = type("Samples", (), {"data": torch.stack([2 * ramp, 0 * ramp])})

        def get_all_samples(self):
            return self.samples


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"array": [0.1] * 9, "sampling_rate": "x"}, "sampling_rate is not a positive number: 'x'"),
        ({"array": [0.1] * 9, "sampling_rate": -1}, "is not a positive number: -1"),
        ({"array": [0.1, float("nan")]}, "not finite"),
        ({"array": [0.1, 0.2]}, "has no sampling_rate; add it beside the array"),
        ({"array": [[0.1, 0.2], [0.1]]}, "not rectangular"),
        ({"array": ["a", "b"]}, "is not audio"),
        ({"array": [1 << 20, -3]}, "give 16-bit integers"),
        ({"array": [8000.0, -3.5]}, "up to 8000.0; give 16-bit integers, or floats up to 1"),
    ],
    ids=str,
)
def test_array_that_is_not_audio_raises(source, problem, tmp_path):
    with pytest.raises(SampleError, match=problem):
        load_audio(source, tmp_path, 16000)


@pytest.mark.parametrize(("size", "problem"), [(None, "tone.wav is truncated after 0.010 s"), (2**31 - 2, None)])
def test_truncated_wav_raises(size, problem, tmp_path):
    """Encoders that write to a stream leave the largest size in the header."""
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.ones(400, "<i2").tobytes())
    data = bytearray((tmp_path / "tone.wav").read_bytes()[: 44 + 320])
    if size:
        data[40:44] = struct.pack("<I", size)
    (tmp_path / "tone.wav").write_bytes(data)
    if problem:
        with pytest.raises(SampleError, match=problem):
            load_audio("tone.wav", tmp_path, 16000)
    else:
        assert len(load_audio("tone.wav", tmp_path, 16000)) == 160


def test_integer_samples_are_those_of_a_file(tmp_path):
    samples = (8000 * np.sin(np.arange(400) / 9)).astype("<i2")
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    decoded = load_audio("tone.wav", tmp_path, 16000)
    np.testing.assert_array_equal(
        load_audio({"array": samples.tolist(), "sampling_rate": 16000}, tmp_path, 16000), decoded
    )
    np.testing.assert_array_equal(
        load_audio({"array": decoded.tolist(), "sampling_rate": 16000}, tmp_path, 16000), decoded
    )


@pytest.mark.parametrize("fps", ["a", -1, float("inf"), [2]], ids=str)
def test_rate_of_frames_that_is_not_a_number_raises(fps, tmp_path):
    frames = np.zeros((4, 8, 8, 3), np.uint8)
    with pytest.raises(SampleError, match="fps is not a positive number"):
        load_video({"array": frames, "fps": fps}, tmp_path, Limits())


def test_rate_of_a_video_file_raises(tmp_path):
    draw(tmp_path / "1.gif", 1)
    with pytest.raises(SampleError, match=r"fps is of frames and arrays, and 1.gif is a file; .* data.max_fps"):
        load_video({"path": "1.gif", "fps": 1}, tmp_path, Limits())


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_rate_of_an_animation_is_the_mean(name, tmp_path):
    """The first frame is often shown longer."""
    frames = [Image.open(draw(tmp_path / f"{number}.png", 6 * number)) for number in range(4)]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=[1400, 200, 200, 200])
    assert load_video(name, tmp_path, Limits()).fps == 2.0
    for frame in frames:
        frame.close()


def test_animation_that_is_cut_off_raises(tmp_path):
    frames = [Image.fromarray(np.random.default_rng(n).integers(0, 255, (20, 30, 3), np.uint8)) for n in range(5)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:])
    data = (tmp_path / "a.webp").read_bytes()
    (tmp_path / "a.webp").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(SampleError, match=r"the video a\.webp does not decode"):
        load_video("a.webp", tmp_path, Limits())


def box(name, size, content=b""):
    """A box of an MP4 file, whose size is in 64 bits where it is over 32."""
    long = size >= 2**32
    return struct.pack(">I", 1 if long else size) + name + (struct.pack(">Q", size) if long else b"") + content


def riff(size, name=b"AVI "):
    return b"RIFF" + struct.pack("<I", size) + name


def flv(*tags, size=None):
    """An FLV file with these contents of video tags."""
    number = struct.pack(">d", size or 0)
    metadata = b"\x02\0\x0aonMetaData\x08\0\0\0\1\0\x08filesize\0" + number + b"\0\0\x09"
    found = b"FLV\x01\x01" + struct.pack(">I", 9) + bytes(4)
    for kind, content in ((18, metadata), *((9, tag) for tag in tags)):
        found += bytes([kind]) + len(content).to_bytes(3) + bytes(7) + content + struct.pack(">I", 11 + len(content))
    return found


EBML = b"\x1a\x45\xdf\xa3\x84abcd\x18\x53\x80\x67"
MP4 = box(b"ftyp", 16, bytes(8))


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (EBML + b"\x01" + (100).to_bytes(7), len(EBML) + 8 + 100),
        (EBML + b"\x41\x00", len(EBML) + 2 + 256),
        (MP4 + box(b"moov", 16, bytes(8)) + box(b"mdat", 64), 96),
        (MP4 + box(b"mdat", 2**33, bytes(8)), 16 + 2**33),
        (riff(28, b"AVI ") + bytes(24) + riff(20, b"AVIX"), 36 + 28),
        (flv(bytes(50), bytes(40), size=198)[:-30], 198),
    ],
    ids=["Matroska", "Matroska, 14 bits", "MP4, its index first", "MP4, 64 bits", "AVI of two chunks", "FLV"],
)
def test_files_that_are_cut_off_raise(header, size, tmp_path):
    """Decoders return the frames before the end."""
    data = header + bytes(7)
    (tmp_path / "a.bin").write_bytes(data)
    for load in (load_video, lambda source, folder, _: load_audio(source, folder, 16000)):
        with pytest.raises(SampleError, match=rf"a\.bin is cut off: it has {len(data)} bytes, of at least {size} in"):
            load("a.bin", tmp_path, Limits())


@pytest.mark.parametrize(
    "data",
    [
        EBML + b"\x01" + b"\xff" * 7 + bytes(9),
        EBML + b"\xff" + bytes(9),
        EBML + b"\x84" + bytes(4),
        EBML,
        b"\x1a\x45\xdf\xa3",
        MP4 + box(b"mdat", 0, bytes(40)),
        MP4 + box(b"mdat", 24, bytes(16)) + box(b"moov", 16, bytes(8)),
        MP4 + b"appended by a camera",
        MP4 + bytes(20),
        riff(2**32 - 1) + bytes(24),
        riff(28) + bytes(24) + b"appended",
        flv(bytes(50), size=141),
        flv(bytes(50), size=141)[:-4],
        flv(bytes(50), size=10**6),
        flv(bytes(50), size=100) + b"\x09appended by a tool",
        flv(bytes(50))[:-20],
        flv(bytes(50), size=float("nan"))[:-20],
        b"FLV\x01",
    ],
)
def test_whole_files_and_those_of_streams_lack_no_bytes(data):
    assert missing_bytes(data) == 0


@pytest.mark.parametrize("options", [{}, {"movflags": "faststart"}, {"movflags": "frag_keyframe+empty_moov"}], ids=str)
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.flv"])
def test_half_of_a_video_file_raises(name, options, tmp_path):
    file = write_mp4(tmp_path / name, options=options)
    data = file.read_bytes()
    assert load_video(name, tmp_path, Limits()).total == 10
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(SampleError, match="is cut off"):
        load_video(name, tmp_path, Limits())


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp"])
def test_still_image_is_not_a_video(name, tmp_path):
    """Such as an image in the column of videos, also with the name of a video."""
    Image.new("RGB", (8, 8)).save(tmp_path / name)
    file = (tmp_path / name).rename(tmp_path / "a.mp4")
    with pytest.raises(SampleError, match=r"a\.mp4 is a still image \((PNG|JPEG|BMP)\); give it as an image"):
        load_video(file.name, tmp_path, Limits())


@pytest.mark.parametrize("name", ["a.gif", "a.webp"])
def test_animation_of_one_frame(name, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / name)
    assert load_video(name, tmp_path, Limits()).total == 1


@pytest.mark.parametrize("size", [(3000, 3), (1, 5000), (90, 80)], ids=str)
def test_most_pixels_of_long_images(size, tmp_path):
    Image.new("RGB", size).save(tmp_path / "1.png")
    width, height = load_image("1.png", tmp_path, Limits(max_pixels=1000)).size
    assert 900 <= width * height <= 1000
    assert (width > height) == (size[0] > size[1])


def test_short_videos_have_two_frames(tmp_path):
    video = load_video({"array": np.zeros((6, 8, 8, 3), np.uint8), "fps": 30}, tmp_path, Limits(max_fps=2.0))
    assert video.indices == [0, 5]


def test_pixels_that_are_not_finite_raise(tmp_path):
    with pytest.raises(SampleError, match="not finite"):
        load_image({"array": np.full((8, 8, 3), np.nan)}, tmp_path, Limits())


def test_torchcodec_decodes_where_it_is_installed(tmp_path, monkeypatch):
    for module in (media, audio):
        monkeypatch.setattr(module, "torchcodec_decoders", lambda: FakeDecoders)
    video = load_video({"bytes": b"video"}, tmp_path, Limits(max_frames=3))
    assert video.frames.shape == (3, 4, 6, 3)
    assert (video.indices, video.total, video.fps) == ([0, 4, 9], 10, 5.0)
    assert video.frames[:, 0, 0, 0].tolist() == [0, 4, 9]
    assert load_audio_track({"bytes": b"video"}, tmp_path, 16_000).tolist() == list(range(16))
    # A format that soundfile does not know.
    assert load_audio({"bytes": b"video"}, tmp_path, 16_000).tolist() == list(range(16))


def write_mp4(file, seconds=1, with_audio=True, size=(32, 32), volumes=(1.0,), options=None):
    av = pytest.importorskip("av")
    with av.open(str(file), "w", options=options or {}) as container:
        stream = container.add_stream("flv" if file.suffix == ".flv" else "mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        layout = "mono" if len(volumes) == 1 else "stereo"
        track = container.add_stream("aac", rate=16_000, layout=layout) if with_audio else None
        for number in range(10 * seconds):
            pixels = np.full((*size[::-1], 3), 20 * number % 256, np.uint8)
            pixels[: size[1] // 2, : size[0] // 2] = 250
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
        if track is not None:
            tone = np.outer(volumes, np.sin(np.arange(16_000 * seconds) * 0.2)).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(tone, format="fltp", layout=layout)
            frame.sample_rate = 16_000
            container.mux(track.encode(frame))
            container.mux(track.encode())
    return file


def test_video_file_and_its_audio_track(tmp_path):
    file = write_mp4(tmp_path / "a.mp4")
    video = load_video(str(file), tmp_path, Limits(max_frames=4))
    assert video.frames.shape == (4, 32, 32, 3)
    assert (video.total, video.fps) == (10, 10.0)
    samples = load_audio_track(str(file), tmp_path, 8_000)
    assert abs(len(samples) - 8_000) < 1_000
    assert np.abs(samples).max() > 0.5
    silent = write_mp4(tmp_path / "b.mp4", with_audio=False)
    assert load_audio_track(str(silent), tmp_path, 8_000) is None


@pytest.fixture(params=["av", "torchcodec"])
def decoder(request, monkeypatch):
    """The package that decodes videos and their audio."""
    pytest.importorskip("av")
    found = media.torchcodec_decoders()
    if request.param == "torchcodec" and found is None:
        pytest.skip("torchcodec does not import")
    for module in (media, audio):
        monkeypatch.setattr(module, "torchcodec_decoders", lambda: found if request.param == "torchcodec" else None)
    return request.param


@pytest.mark.parametrize("volumes", [(0.4, 0.4), (0.6, 0.2)], ids=str)
def test_channels_of_a_track_are_averaged(volumes, decoder, tmp_path):
    """FFmpeg's own mixing makes two channels 1.4 times as loud."""
    found = load_audio_track(str(write_mp4(tmp_path / "a.mp4", volumes=volumes)), tmp_path, 16_000)
    assert found.dtype == np.float32
    loudest = float(np.quantile(np.abs(found[2_000:-2_000]), 0.99))
    assert loudest == pytest.approx(0.4, rel=0.1)


def test_decoders_give_the_same_video(decoder, tmp_path, monkeypatch):
    file = str(write_mp4(tmp_path / "a.mp4", seconds=3))
    found = load_video(file, tmp_path, Limits(max_frames=7)), load_audio_track(file, tmp_path, 8_000)
    for module in (media, audio):
        monkeypatch.setattr(module, "torchcodec_decoders", lambda: None)
    expected = load_video(file, tmp_path, Limits(max_frames=7)), load_audio_track(file, tmp_path, 8_000)
    assert (found[0].indices, found[0].total, found[0].fps) == ([0, 5, 10, 14, 19, 24, 29], 30, 10.0)
    np.testing.assert_array_equal(found[0].frames, expected[0].frames)
    np.testing.assert_array_equal(found[1], expected[1])


def test_audio_that_soundfile_does_not_know(tmp_path):
    """AAC, alone or beside a video."""
    file = write_mp4(tmp_path / "a.mp4")
    expected = load_audio_track(str(file), tmp_path, 8_000)
    np.testing.assert_array_equal(load_audio(str(file), tmp_path, 8_000), expected)
    silent = write_mp4(tmp_path / "b.mp4", with_audio=False)
    with pytest.raises(SampleError, match=r"b.mp4 (does not decode|is not a 16-bit PCM WAV file)") as caught:
        load_audio(str(silent), tmp_path, 8_000)
    # It is installed.
    assert "PyAV" not in str(caught.value)


def test_file_without_video_stream_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(media, "torchcodec_decoders", lambda: None)
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(SampleError, match="has no video stream"):
        load_video("a.mp4", tmp_path, Limits())


@pytest.mark.parametrize("size", [100, 900, 4_000])
def test_video_file_that_is_cut_off_raises(size, decoder, tmp_path):
    whole = write_mp4(tmp_path / "a.mp4").read_bytes()
    (tmp_path / "b.mp4").write_bytes(whole[:size])
    with pytest.raises(SampleError, match=r"b\.mp4 is cut off"):
        load_video("b.mp4", tmp_path, Limits())


@pytest.mark.parametrize(("frames", "seeks"), [(3, True), (9, True), (100, False)])
def test_frames_of_long_videos_are_decoded_from_keyframes(frames, seeks, tmp_path, monkeypatch):
    """mpeg4 has a keyframe every 12 frames here."""
    monkeypatch.setattr(media, "torchcodec_decoders", lambda: None)
    file = write_mp4(tmp_path / "a.mp4", seconds=12, with_audio=False)
    answers = []
    from_keyframes = seeking._from_keyframes
    monkeypatch.setattr(seeking, "_from_keyframes", lambda *args: answers.append(from_keyframes(*args)) or answers[-1])
    found = load_video(str(file), tmp_path, Limits(max_frames=frames))
    assert [answer is not None for answer in answers] == [seeks]
    monkeypatch.setattr(seeking, "_from_keyframes", lambda *args: None)
    expected = load_video(str(file), tmp_path, Limits(max_frames=frames))
    assert (found.indices, found.total, found.fps) == (expected.indices, expected.total, expected.fps)
    np.testing.assert_array_equal(found.frames, expected.frames)


def test_rotated_video_is_upright(tmp_path):
    """Phones write the orientation beside the frames, in the header of the track."""
    data = bytearray(write_mp4(tmp_path / "a.mp4", with_audio=False, size=(64, 32)).read_bytes())
    matrix = data.index(b"tkhd") + 44
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    found = load_video({"bytes": bytes(data)}, tmp_path, Limits(max_frames=2)).frames
    plain = load_video("a.mp4", tmp_path, Limits(max_frames=2)).frames
    np.testing.assert_array_equal(found, np.rot90(plain, -1, axes=(1, 2)))


def test_frames_have_no_audio_track(tmp_path):
    assert load_audio_track({"frames": [str(draw(tmp_path / "1.png", 1))]}, tmp_path, 16_000) is None


def test_image_of_the_hub_that_cannot_be_downloaded_is_not_a_bad_sample(hub, tmp_path, monkeypatch):
    hub.repositories["datasets/org/name"] = draw(tmp_path / "remote/1.png", 1).parent
    folder = data_folder("hf://datasets/org/name")
    with pytest.raises(SampleError, match=r"2\.png cannot be read \(the data set org/name has no such file"):
        load_image("2.png", folder, Limits())
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match=r"1\.png of the data set org/name cannot be downloaded"):
            load_image("1.png", folder, Limits())
    assert load_image("1.png", folder, Limits()).size == load_image("1.png", tmp_path / "remote", Limits()).size
