"""What a processor is called with: rates of frames, audio tracks of videos, padding of audio."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from opslot.data.multimodal.media import Limits, Video, load_video
from opslot.data.multimodal.processor_call import _of_audio, call_processor, source_has


class Extractor:
    n_fft = 400
    hop_length = 160
    n_samples = 480_000
    sampling_rate = 16_000

    def __call__(self, audio, sampling_rate=None, max_length=None):
        pass


class Omni(transformers.Qwen2_5OmniProcessor):
    """Returns what it was called with."""

    def __init__(self):
        self.video_processor = SimpleNamespace(temporal_patch_size=2)
        self.feature_extractor = Extractor()

    def __call__(self, **arguments):
        return arguments


def video(sampled, total, fps=10.0):
    frames = np.zeros((sampled, 4, 4, 3), np.uint8)
    return Video(frames, np.linspace(0, total - 1, sampled).round().astype(int).tolist(), total, fps)


def call(videos=(), audio=(), tracks=(), masks_audio=False):
    media = {"image": [], "video": list(videos), "audio": list(audio)}
    return call_processor(Omni(), "text", media, tracks, takes_frame_rate=True, masks_audio=masks_audio)


def test_frames_have_the_rate_of_their_video():
    """The default of Qwen-Omni's processors is 2 frames per second, whatever the rate of the video."""
    assert call([video(10, 40)])["fps"] == 2.5
    outputs = call([video(10, 40), video(10, 20)])
    torch.testing.assert_close(outputs["video_second_per_grid"], torch.tensor([0.8, 0.4]))


def test_video_of_one_frame():
    """The processors of Qwen3-VL and GLM-V raise an error where there are fewer frames than a step has."""
    found = call([video(1, 1)])
    assert [len(frames) for frames in found["videos"]] == [2]
    assert found["video_metadata"] == [{"total_num_frames": 1, "fps": 10.0, "frames_indices": [0, 0]}]
    assert found["fps"] == 10.0
    assert [len(frames) for frames in call([video(3, 9)])["videos"]] == [3]


@pytest.mark.parametrize("name", ["GotOcr2Processor", "Idefics3Processor"])
def test_images_of_a_processor_with_pages(name):
    """GOT-OCR's raises for a nested list, which it takes for the pages of one document."""

    class Images(getattr(transformers, name)):
        def __init__(self):
            pass

        def __call__(self, **arguments):
            return arguments

    media = {"image": ["first", "second"], "video": [], "audio": []}
    found = call_processor(Images(), "text", media, (), takes_frame_rate=False, masks_audio=False)
    assert found["images"] == (media["image"] if name == "GotOcr2Processor" else [media["image"]])


class Videos:
    """A processor of videos alone."""

    def __init__(self, video_processor):
        self.video_processor = video_processor

    def __call__(self, *, videos, video_metadata, **_):
        return self.video_processor(
            videos=videos, video_metadata=video_metadata, do_sample_frames=False, return_tensors="pt"
        )


@pytest.mark.parametrize("name", ["Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor", "Glm4vVideoProcessor"])
def test_video_of_one_frame_has_the_features_of_two_equal_ones(name):
    pytest.importorskip("torchvision")
    size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64 * 8}
    processor = Videos(getattr(transformers, name)(size=size, patch_size=16, merge_size=2, temporal_patch_size=2))
    frames = np.random.default_rng(0).integers(0, 255, (1, 64, 64, 3), np.uint8)
    one, two = (
        call_processor(
            processor,
            "text",
            {"image": [], "video": [Video(np.repeat(frames, count, 0), [0] * count, count, 10.0)], "audio": []},
            (),
            takes_frame_rate=False,
            masks_audio=False,
        )
        for count in (1, 2)
    )
    torch.testing.assert_close(one["pixel_values_videos"], two["pixel_values_videos"], rtol=0, atol=0)
    assert one["video_grid_thw"].tolist() == two["video_grid_thw"].tolist()


def test_audio_of_videos_at_different_rates_raises():
    track = np.zeros(16_000, np.float32)
    call([video(10, 20), video(5, 10)], [track, track], [0, 1])
    with pytest.raises(ValueError, match=r"different rates \(2.5, 5 per second\)"):
        call([video(10, 40), video(10, 20)], [track, track], [0, 1])


@pytest.mark.skipif(
    not hasattr(Omni, "_resolve_audio_from_video"), reason="Transformers before 5.23 pairs videos and audio by itself"
)
def test_audio_beside_the_tracks_of_videos():
    """Each audio is marked as a track or as audio by itself, which Transformers requires."""
    track = np.zeros(16_000, np.float32)
    found = call([video(10, 20)], [track, track], [None, 0])
    assert found["load_audio_from_video"]
    assert found["audio_from_video_indices"] == [None, 0]
    assert "load_audio_from_video" not in call([video(10, 20)], [track], [None])


def test_audio_is_padded_to_a_window_after_its_end():
    """Not to 30 seconds, or 300 of Qwen-Omni's checkpoints."""
    short = np.zeros(1_000, np.float32)
    assert call(audio=[short], tracks=[None], masks_audio=True)["audio_kwargs"]["max_length"] == 1_440
    both = call(audio=[short, np.zeros(10**6)], tracks=[None] * 2, masks_audio=True)
    assert both["audio_kwargs"]["max_length"] == 480_000
    assert "max_length" not in call(audio=[short], tracks=[None])["audio_kwargs"]


@pytest.mark.parametrize("attribute", ["feature_extractor", "audio_processor"])
def test_extractors_that_take_the_rate_get_it(attribute):
    """Those of OmniASR and Phi-4 multimodal logged a warning for each sample, and again for each batch."""
    processor = SimpleNamespace(**{attribute: Extractor()})
    found = _of_audio(processor, [np.zeros(1_000, np.float32)], masks_audio=False)
    assert found == {"sampling_rate": 16_000}


def test_extractor_that_does_not_take_the_rate():
    """Granite Speech's raises TypeError for it."""

    class WithoutRate:
        def __call__(self, audios, device=None):
            pass

    processor = SimpleNamespace(audio_processor=WithoutRate())
    assert _of_audio(processor, [np.zeros(1_000, np.float32)], masks_audio=False) == {}


@pytest.mark.parametrize("name", ["Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor"])
def test_omni_processors_are_recognized(name):
    own = type("Own", (getattr(transformers, name),), {})
    assert source_has(own, "use_audio_in_video")
    assert source_has(own, "video_second_per_grid")
    assert not source_has(transformers.Qwen3VLProcessor, "video_second_per_grid")


@pytest.mark.parametrize(("max_fps", "count"), [(None, 6), (2, 4), (0.1, 2), (100, 6)])
def test_frames_per_second_are_bounded(tmp_path, max_fps, count):
    pixels = np.zeros((20, 4, 4, 3), np.uint8)
    found = load_video({"array": pixels, "fps": 10}, tmp_path, Limits(max_frames=6, max_fps=max_fps))
    assert len(found.frames) == count
    # Of frames of an unknown rate, none is left out.
    assert len(load_video({"array": pixels}, tmp_path, Limits(max_fps=0.1)).frames) == 20


def test_images_are_those_of_one_sample():
    """As in apply_chat_template: LLaVA-OneVision's processor takes images in a flat list for those of several samples,
    each of which it splits in tiles."""
    given = {}
    media = {"image": ["a", "b"], "video": [], "audio": []}
    call_processor(lambda **inputs: given.update(inputs), "", media, [], takes_frame_rate=False, masks_audio=False)
    assert given["images"] == [["a", "b"]]
