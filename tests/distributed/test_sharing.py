"""Images, videos and audio shared over sequence-parallel ranks: each rank's encoder runs on a part of them."""

import functools
from itertools import pairwise

import pytest
import torch
from torch.utils import _pytree as pytree

import opslot
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.distributed import init_parallel_state, shard_sequence
from opslot.models._multimodal import sequence as multimodal_sequence
from opslot.models._multimodal.images import visual_inputs
from opslot.models._multimodal.modalities import feature_module, features_of, find_towers
from opslot.models._multimodal.probe import Probe
from opslot.models._multimodal.sharing import Sharing, _bounds, share, sharing_of
from opslot.verify.media import media_samples, pack, with_common_divisor
from opslot.verify.random_model import random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config

# Two images, one video (fewer than ranks), text, and several of each packed.
KINDS = {
    "qwen3_vl": ("image", "video", "text", "packed"),
    "qwen2_5_vl": ("mixed", "video"),
    "deepseek_vl_hybrid": ("image",),
    "gemma3": ("image", "one"),
    "hunyuan_vl": ("image",),
    "gemma4": ("image", "video", "audio"),
    "idefics3": ("image",),
    "kimi_k25": ("video",),
    "llava_onevision": ("image", "video"),
    "mistral3": ("image", "text"),
    "audioflamingo3": ("audio",),
    "voxtral": ("audio",),
}


def config_of(name):
    """A tiny config; that of Qwen3-VL with encoder features for several layers, as published models have."""
    config = tiny_config(name)
    if name == "qwen3_vl":
        config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 3, [0, 1, 2]
    return config


def build(name):
    config = config_of(name)
    model = random_model(config).eval()
    batches = dict(media_samples(model).batches)
    if "packed" in KINDS[name]:
        positions = RopePositions(config, type(model).__name__)
        batches["packed"] = pack(positions, [batches["image"], batches["text"], batches["image"]])
    if name == "gemma3":
        batches["one"] = _without_second_image(batches["image"], config.image_token_id)
    opslot.apply(model, "eager")
    return model, [batches[kind] for kind in KINDS[name]]


def _without_second_image(batch, token):
    ids = batch["input_ids"][0]
    places = (ids == token).nonzero().flatten()
    start = places[len(places) // 2]
    per_token = {key: value[:, :start] for key, value in batch.items() if value.shape == batch["input_ids"].shape}
    return {**batch, **per_token, "pixel_values": batch["pixel_values"][:1]}


def on_ranks(name):
    state = init_parallel_state(device_type="cpu", sp=2)
    model, batches = build(name)
    opslot.parallelize(model, state)
    seen = count_inputs(model, len)
    own = [shard_sequence(batch, state) for batch in with_common_divisor(batches)]
    found = {key: value.tolist() for key, value in train_step(model, own).items()}
    return found, sum(seen)


def count_inputs(model, measure):
    """The list that gets the measure of each input of the layer that embeds patches or frames of audio."""
    found = [
        module
        for name, module in feature_module(model).named_modules()
        if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d)
        or name.endswith("patch_embedder.input_proj")
    ]
    seen = []
    found[0].register_forward_pre_hook(lambda module, args: seen.append(measure(args[0])))
    return seen


@pytest.mark.quick("gemma3")
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_equal_one_process(ranks, name):
    model, batches = build(name)
    expected = train_step(model, with_common_divisor(batches))
    parts = ranks.run(on_ranks, name, timeout=60)
    found = [{key: torch.tensor(value) for key, value in part.items()} for part, _ in parts]
    found[0]["loss"] += found[1]["loss"]
    assert worst_difference(found[0], expected) == ""


@pytest.mark.parametrize(
    ("name", "method", "expected"),
    [
        ("qwen3_vl", "get_image_features", Sharing(by_frame=False, is_known=True)),
        ("qwen3_vl", "get_video_features", Sharing(by_frame=True, is_known=True)),
        ("ernie4_5_vl_moe", "get_video_features", Sharing(by_frame=False, is_known=True)),
        ("gemma4", "get_video_features", Sharing(by_frame=True, is_known=False)),
        ("hunyuan_vl", "get_image_features", Sharing(by_frame=False, is_known=False)),
        ("idefics3", "get_image_features", Sharing(by_frame=True, is_known=False)),
        ("mistral3", "get_image_features", Sharing(by_frame=False, is_known=False)),
        ("ovis2", "get_image_features", None),
        ("qwen2_5_omni", "get_audio_features", Sharing(by_frame=False, is_known=False)),
        ("granite_speech", "get_audio_features", None),
        ("hy_v4_vl", "get_image_features", Sharing(by_frame=False, is_known=False)),
    ],
)
def test_how_ranks_share(name, method, expected):
    """ernie4_5_vl_moe joins frames. hunyuan_vl and hy_v4_vl have features at the ends of rows too, in proportion to the
    patches of images of one width. ovis2 also returns embeddings of the tokens around images, which were taken
    for features of images. The batch norms of granite_speech, in training, normalize by all audios.
    """
    assert sharing_of(feature_module(random_model(tiny_config(name))), method) == expected


def test_images_in_a_dim_that_is_not_the_first_are_not_shared(monkeypatch):
    """As in HunYuan-VL up to Transformers 5.17: ranks exchanged features along the first dim."""
    holder = feature_module(random_model(tiny_config("hunyuan_vl")))
    original = type(holder).get_image_features

    @functools.wraps(original)
    def joined(*args, **kwargs):
        outputs = original(*args, **kwargs)
        outputs.pooler_output = torch.cat(outputs.pooler_output)[None]
        return outputs

    monkeypatch.setattr(type(holder), "get_image_features", joined)
    assert sharing_of(holder, "get_image_features") is None


def test_images_that_attend_to_each_other_are_not_shared(monkeypatch):
    """As in MiniMax-M3 up to Transformers 5.17: ranks that shared them computed other gradients of the encoder."""
    holder = feature_module(random_model(tiny_config("qwen3_vl")))
    original = type(holder).get_image_features

    @functools.wraps(original)
    def joined(*args, **kwargs):
        outputs = original(*args, **kwargs)
        mean = torch.cat(outputs.pooler_output).mean()
        outputs.pooler_output = tuple(image + mean for image in outputs.pooler_output)
        return outputs

    assert sharing_of(holder, "get_image_features")
    monkeypatch.setattr(type(holder), "get_image_features", joined)
    other = feature_module(random_model(tiny_config("qwen3_vl")))
    assert not sharing_of(other, "get_image_features")


@pytest.mark.parametrize("method", ["get_image_features", "get_video_features"])
def test_images_with_features_for_several_layers_are_shared(method):
    """Those of one layer were compared with another layer's, so that no published Qwen3-VL shared images."""
    assert sharing_of(feature_module(random_model(config_of("qwen3_vl"))), method)


@pytest.mark.parametrize("name", ["blip-2", "llama4"])
def test_images_with_nested_or_internal_outputs_are_shared(name):
    assert sharing_of(feature_module(random_model(tiny_config(name))), "get_image_features")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Three images over two ranks, and one smallest input on the rank that has none of a single image.
        ("gemma3", [2, 2]),
        # One of two images and the smallest video, then the smallest image and the only frame or another; the smallest
        # image and video beside audio.
        ("gemma4", [6, 6]),
        ("idefics3", [1, 1]),
        # Five crops of an image in each of two, a video of two frames, and the smallest inputs.
        ("llava_onevision", [8, 8]),
        # Two images, and the smallest input of each rank beside text.
        ("mistral3", [2, 2]),
        ("voxtral", [1, 1]),
    ],
)
def test_each_rank_computes_a_part(ranks, name, expected):
    assert [seen for _, seen in ranks.run(on_ranks, name, timeout=60)] == expected


def features_of_videos(name, sizes):
    """Whether features of shared videos equal those of unshared ones, and the patches that this rank computed."""
    init_parallel_state(device_type="cpu", sp=2)
    model, _ = build(name)
    holder = feature_module(model)
    method = "get_video_features"
    inputs = visual_inputs(holder, method, sizes)
    generator = torch.Generator().manual_seed(0)
    inputs["pixel_values_videos"] = torch.randn(inputs["pixel_values_videos"].shape, generator=generator)
    pixels = inputs["pixel_values_videos"].shape[-1]
    expected = pytree.tree_leaves(features_of(getattr(holder, method)(**inputs)))
    find_towers(model).run_on_every_rank(model)
    seen = count_inputs(model, lambda x: x.numel() // pixels)
    # As in the forward pass of the model.
    before = multimodal_sequence._whole.set(True)
    try:
        found = pytree.tree_leaves(features_of(getattr(holder, method)(**inputs)))
    finally:
        multimodal_sequence._whole.reset(before)
    equal = [x.shape == y.shape and torch.allclose(x, y, atol=1e-6) for x, y in zip(found, expected, strict=True)]
    return equal, seen


@pytest.mark.parametrize(
    ("name", "sizes", "patches"),
    [
        # 8 patches of each of three frames, and 16 of one.
        ("qwen2_5_vl", [(3, 1, 2), (1, 2, 2)], [16, 24]),
        ("qwen3_vl", [(3, 1, 2), (1, 2, 2)], [16, 24]),
        ("gemma4", [(4, 1, 2)], [16, 16]),
    ],
)
def test_ranks_share_the_frames_of_a_video(ranks, name, sizes, patches):
    parts = ranks.run(features_of_videos, name, sizes, timeout=60)
    assert all(equal and all(equal) for equal, _ in parts)
    assert [seen for _, seen in parts] == [[count] for count in patches]


def share_one_image():
    """One image with a mask, and a smallest one of fewer frames without."""
    init_parallel_state(device_type="cpu", sp=2)

    def encode(pixel_values, pixel_attention_mask=None):
        return pixel_values if pixel_attention_mask is None else pixel_values * pixel_attention_mask

    given = {"pixel_values": torch.full((1, 4, 3), 2.0), "pixel_attention_mask": torch.full((1, 4, 3), 3.0)}
    found = share(encode, lambda: {"pixel_values": torch.ones(1, 2, 3)}, given, {}, Sharing(False, False))
    return found.tolist()


def test_smallest_inputs_of_another_form(ranks):
    """The mask of the real image was passed with them, and their features were exchanged in their own shape."""
    assert ranks.run(share_one_image, timeout=60) == [torch.full((1, 4, 3), 6.0).tolist()] * 2


@pytest.mark.parametrize(
    ("patches", "ranks", "most"),
    [([4, 4, 4, 4], 2, 8), ([12, 2, 2, 2], 2, 12), ([2, 2, 12], 2, 12), ([8], 2, 8), ([8], 4, 8), ([3, 3], 4, 3)],
)
def test_parts_are_contiguous_and_balanced(patches, ranks, most):
    bounds = _bounds(patches, ranks)
    assert len(bounds) == ranks + 1
    assert (bounds[0], bounds[-1]) == (0, len(patches))
    assert bounds == sorted(bounds)
    assert max(sum(patches[start:stop]) for start, stop in pairwise(bounds)) == most


def test_probed_layers_of_one_form_share_their_weights():
    """Encoders may have billions of parameters, and every rank tries their inputs on its CPU."""
    config = tiny_config("qwen3_vl")
    config.vision_config.depth = 3
    blocks = Probe(feature_module(random_model(config)), "get_image_features").model.visual.blocks
    parameters = list(blocks[0].parameters())
    assert all(p.isfinite().all() for p in parameters)
    assert all(a is b for a, b in zip(parameters, blocks[2].parameters(), strict=True))
