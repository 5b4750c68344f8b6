"""Models read integer inputs on the host: on the meta device, every synchronization is an error."""

import copy
import functools
import gc
import pickle
import re
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    masking_utils,
)

import opslot
from opslot._base.host_values import device_copy, host_values
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.models._hooks import remove_hooks
from opslot.models._multimodal.host_inputs import (
    _HostInputs,
    keep_inputs_from_fsdp,
    keep_inputs_on_host,
    map_inputs_of_compiled_layers,
)
from opslot.ops.attention.masks import MaskFunction, reads_layout
from opslot.trainer.processors import multimodal_class
from opslot.verify.media import media_samples, packed_samples
from opslot.verify.random_model import trained_part
from opslot.verify.tiny import tiny_config

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 1,
}
TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
LEARNED = {**TOWER, "num_position_embeddings": 16}
TOWERS = {
    "qwen2_vl": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
    "qwen2_5_vl": {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**LEARNED, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": LEARNED,
}
SECTIONS = {"qwen2_vl": [2, 3, 3], "qwen2_5_vl": [2, 3, 3], "qwen3_vl": [4, 2, 2], "qwen3_5": [1, 1, 0]}
IMAGE, VIDEO, START, END = 100, 101, 102, 103


def build(name):
    rope = {"rope_type": "default", "mrope_section": SECTIONS[name], "rope_theta": 1e4}
    if name == "qwen3_5":
        rope["partial_rotary_factor"] = 0.25
    config = AutoConfig.for_model(
        name,
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=TOWERS[name],
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = AutoModelForImageTextToText.from_config(config)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
            module.config._attn_implementation_internal = "test_flash"
    return model


def batch_of(name):
    """Two images, a video and text in one sequence."""
    images, videos = torch.tensor([[1, 4, 4], [1, 4, 8]]), torch.tensor([[2, 4, 4]])
    frames = [[VIDEO] * 4] * 2 if name in ("qwen3_vl", "qwen3_5") else [[VIDEO] * 8]
    ids = [5, START, *[IMAGE] * 4, END, 7, START, *[IMAGE] * 8, END]
    ids += [token for frame in frames for token in (START, *frame, END)]
    ids = torch.tensor([[*ids, 9, 10]])
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(int(images.prod(-1).sum()), 3 * 2 * 16),
        "image_grid_thw": images,
        "pixel_values_videos": torch.randn(int(videos.prod(-1).sum()), 3 * 2 * 16),
        "video_grid_thw": videos,
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
    }


@pytest.fixture(autouse=True)
def flash_attention():
    """Attention over cu_seqlens that computes nothing: towers split their inputs for any other."""

    def attend(module, query, key, value, attention_mask=None, **kwargs):
        # The encoder of Gemma 4 takes patches with padding and their mask.
        assert "cu_seq_lens_q" in kwargs or module.is_causal or type(module).__name__.startswith("Gemma4")
        # Heads of latent attention have values of another size.
        size = value.shape[-1]
        key_and_value = (key[..., :size] + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
        return (query[..., :size] + key_and_value).transpose(1, 2), None

    AttentionInterface.register("test_flash", attend)
    AttentionMaskInterface.register("test_flash", lambda *args, **kwargs: None)


@pytest.mark.quick("qwen3_5", "qwen2_5_vl")
@pytest.mark.parametrize("name", TOWERS)
def test_forward_and_backward_without_synchronization(name):
    model, batch = build(name), batch_of(name)
    positions = {k: v for k, v in batch.items() if k not in ("pixel_values", "pixel_values_videos")}
    position_ids, _ = model.model.get_rope_index(**positions)
    model.to("meta")
    on_device = {k: v.to("meta") if v.is_floating_point() else v for k, v in batch.items()}
    call = {**on_device, "position_ids": position_ids.to("meta"), "labels": batch["input_ids"].to("meta")}
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(**call)
    keep_inputs_on_host(model)
    model(**call).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# With encoders of video and audio, experts, and attention of their own.
FAMILIES = ("gemma4", "glm4v", "kimi_k25", "minimax_m3_vl", "qwen2_5_omni", "qwen3_omni_moe", "qwen3_vl_moe")


def family(name):
    """A tiny model of a family, and samples of each kind packed in a row, all integers but labels on the host."""
    config = tiny_config(name)
    model = opslot.build_foundation_model(config, architecture=multimodal_class(config), ops_implementation="eager")
    part = trained_part(model)
    samples = media_samples(part.eval())
    assert {"qwen2_5_omni": {"image", "video", "audio"}, "glm4v": {"image"}}.get(name, {"image", "video"}) <= {
        *samples.batches
    }
    rows, _ = packed_samples(RopePositions(part.config, type(part).__name__), samples)
    return model.train(), rows[0]


def moved(batch, device, dtype):
    """Features and labels on a device."""
    features = {name: x for name, x in batch.items() if torch.is_tensor(x) and x.is_floating_point()}
    on_device = {name: x.to(device, dtype) for name, x in features.items()}
    return {**batch, **on_device, "labels": batch["labels"].to(device)}


@pytest.mark.quick("qwen2_5_omni", "minimax_m3_vl")
@pytest.mark.parametrize("name", FAMILIES)
def test_family_without_synchronization(name):
    """Experts, whose kernels are for GPUs, compute nothing here."""
    model, batch = family(name)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
            module.config._attn_implementation_internal = "test_flash"
        if type(module).__name__.endswith("Experts"):
            module.forward = functools.partial(scaled_by_weights, module)
    model.to("meta")
    keep_inputs_on_host(model)
    model(**moved(batch, "meta", torch.float32), use_cache=False).loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    # The router of experts that compute nothing, indices of keys, and embeddings that no forward pass reads.
    assert all(re.search(r"\.(gate|router|indexer|audio_bos_eos_token)\.", name) for name in without)


def scaled_by_weights(module, x, *_, **__):
    return x * sum(p.sum() for p in module.parameters())


def test_host_tensors_are_computed_in_one_thread():
    threads = []

    class Records(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device="meta"))

        def get_image_features(self):
            """A method by which models with images are known."""

        def forward(self, input_ids, fail=False):
            threads.append(torch.get_num_threads())
            assert not fail
            return self.scale * input_ids

    model, ids = keep_inputs_on_host(Records()), torch.ones(3, dtype=torch.int64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        model(ids)
        with pytest.raises(AssertionError):
            model(ids, fail=True)
        assert threads == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class WithImages(nn.Module):
    def get_image_features(self):
        """A method by which models with images are known."""


class Reads(nn.Module):
    """What the models do with masks, without layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 6)

    def forward(self, ids, features):
        x = self.embedding(ids)
        mask = (ids == 3).unsqueeze(-1).expand_as(x).to(x.device)
        selected = x[mask]
        assert selected.numel() == features.numel()
        x = x.masked_scatter(mask, features)
        x = x.clone()
        x[ids == 3, :] = x[ids == 3, :] + 1
        return x, selected, x[ids != 3]


def test_masks_select_the_same_elements(monkeypatch):
    """On the meta device only shapes exist, so the replaced operations are also compared on the CPU."""
    import opslot.models._multimodal.host_inputs as host_inputs

    ids, features = torch.tensor([[1, 3, 3], [3, 0, 2]]), torch.randn(3, 6, requires_grad=True)
    model = Reads()
    expected = model(ids, features)
    expected_grad = torch.autograd.grad(sum(x.sum() for x in expected), features)[0]
    monkeypatch.setattr(host_inputs, "_on_host", lambda x: isinstance(x, torch.Tensor) and not x.is_floating_point())
    with host_inputs._HostInputs():
        found = model(ids, features)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(torch.autograd.grad(sum(x.sum() for x in found), features)[0], expected_grad)


def test_masks_expanded_as_features_stay_on_host(monkeypatch):
    """HunYuan-VL expands its mask to the shape of embeddings on the device, and selects by it there."""
    import opslot.models._multimodal.host_inputs as host_inputs

    copied, copy = [], host_inputs.device_copy
    monkeypatch.setattr(host_inputs, "device_copy", lambda x, device: (copied.append(x.numel()), copy(x, device))[1])

    class Expands(WithImages):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 6, device="meta")

        def forward(self, ids):
            x = self.embedding(ids)
            mask = (ids == 3).unsqueeze(-1).expand_as(x).to(x.device)
            copied.clear()
            selected = x[mask]
            assert copied == [3, 3]
            x = x.detach()
            x[mask] = torch.ones(6).expand(3, 6).flatten().to("meta")
            return selected.shape

    assert keep_inputs_on_host(Expands())(torch.tensor([[1, 3, 3], [3, 0, 2]])) == (3 * 6,)


@pytest.mark.parametrize("expanded", [True, False])
def test_masks_over_channels_copy_an_index_per_token(monkeypatch, expanded):
    import opslot.models._multimodal.host_inputs as host_inputs

    copied = []
    monkeypatch.setattr(host_inputs, "_to_device", lambda x, device: (copied.append(x.numel()), x)[1])
    x, mask = torch.zeros(2, 3, 6), torch.tensor([[0, 1, 1], [1, 0, 0]]).bool()[..., None]
    found = host_inputs._masked_scatter(x, mask.expand_as(x) if expanded else mask, torch.ones(3, 6))
    assert torch.equal(found, mask.expand_as(x).float())
    assert copied == [3, 3]


def test_layers_get_device_tensors_with_host_values():
    seen = []

    class Layer(nn.Linear):
        def forward(self, x, bounds):
            seen.append((bounds.device.type, host_values(bounds).tolist()))
            return super().forward(x)

    class Model(WithImages):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(4, 4), Layer(4, 4)])

        def forward(self, x, lengths):
            bounds = nn.functional.pad(lengths.cumsum(0), (1, 0))
            for layer in self.layers:
                x = layer(x, bounds=bounds)
            return x

    model = keep_inputs_on_host(Model().to("meta"))
    model(torch.empty(5, 4, device="meta"), torch.tensor([2, 3]))
    assert seen == [("meta", [0, 2, 5])] * 2


def test_inputs_are_freed_after_the_forward_pass():
    """A copy refers to its source; the cache of copies must not keep both alive."""
    seen = []

    class Layer(nn.Linear):
        def forward(self, x, bounds):
            seen.extend([weakref.ref(bounds), weakref.ref(host_values(bounds))])
            return super().forward(x)

    class Model(WithImages):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(4, 4)])

        def forward(self, x, lengths):
            return self.layers[0](x, bounds=lengths.cumsum(0))

    model = keep_inputs_on_host(Model().to("meta"))
    model(torch.empty(5, 4, device="meta"), torch.tensor([2, 3]))
    gc.collect()
    assert [reference() for reference in seen] == [None, None]


def test_mode_ends_when_the_model_raises():
    class Model(WithImages):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x, ids):
            return self.layers[0](x)

    model = keep_inputs_on_host(Model().to("meta"))
    with pytest.raises(RuntimeError):
        model(torch.empty(2, 3, device="meta"), torch.tensor([1]))
    assert not torch.overrides._get_current_function_mode_stack()


class Seen(WithImages):
    """Records where its ids were."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = []

    def forward(self, ids, x):
        self.seen.append((ids.device.type, ids.to(x.device).device.type))
        return x * self.weight


SMALL_TEXT = {**TEXT, "max_position_embeddings": 64, "sliding_window": 4, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def packed_text():
    """Two documents in one row, as the trainers collate them."""
    ids, offsets = torch.arange(1, 17)[None], torch.tensor([0, 6, 16], dtype=torch.int32)
    lengths = {"max_length_q": 10, "max_length_k": 10}
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    packing = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone(), **lengths}
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, **packing}


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("given", ["positions", "positions and offsets"])
def test_packed_text_without_synchronization(name, given):
    seen = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen.append((kwargs["cu_seq_lens_q"].device.type, kwargs["max_length_q"]))
        key_and_value = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
        return (query + key_and_value).transpose(1, 2), None

    AttentionInterface.register("test_layout", reads_layout(attend))
    own = masking_utils.flash_attention_mask
    AttentionMaskInterface.register("test_layout", MaskFunction(own, "test_layout"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL_TEXT))
    model.config._attn_implementation_internal = "test_layout"
    call = packed_text()
    if given == "positions":
        call = {name: call[name] for name in ("input_ids", "labels", "position_ids")}
    call["labels"] = call["labels"].to("meta")
    model.to("meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(**{k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}, use_cache=False)
    keep_inputs_on_host(model)
    model(**call, use_cache=False).loss.backward()
    assert seen == [("meta", 10)] * 4
    assert all(p.grad is not None for p in model.parameters())


def assert_no_synchronization(model, call, **options):
    """A training step on a GPU does not wait for it, once kernels are compiled and loaded."""
    model(**call, **options).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = model(**call, **options).loss
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "phi3"])
def test_packed_text_on_a_gpu_without_synchronization(name):
    config = AutoConfig.for_model(name, **SMALL_TEXT, **(EXPERTS if name in ("qwen3_moe", "gpt_oss") else {}))
    model = opslot.build_foundation_model(config, torch_dtype="bfloat16", init_device="cuda", ops_implementation="auto")
    keep_inputs_on_host(model)
    call = packed_text()
    call["labels"] = call["labels"].to("cuda")
    call["num_items_in_batch"] = torch.full((), 15, device="cuda")
    assert_no_synchronization(model, call, use_cache=False)


def test_compiled_layers_get_inputs_on_the_device():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Seen(), Seen()])

        def forward(self, ids, x):
            for layer in self.layers:
                x = layer(ids, x)
            assert ids.to(x.device).device.type == "cpu", "the mode is active again after the layers"
            return x

    model = keep_inputs_on_host(Layers().to("meta"))
    compiled = []
    for layer in model.layers:
        layer._compiled_call_impl = lambda ids, x: compiled.append(ids.device.type) or x
    map_inputs_of_compiled_layers(model)
    model(ids=torch.tensor([1, 2]), x=torch.empty(2, device="meta"))
    assert compiled == ["meta", "meta"]


def test_compiled_model_gets_inputs_on_the_device(monkeypatch):
    model = keep_inputs_on_host(Seen().to("meta"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model(ids=torch.tensor([1, 2]), x=torch.empty(2, device="meta"))
    assert model.seen == [("meta", "meta")]


def test_inputs_on_device_are_not_changed():
    model = keep_inputs_on_host(Seen().to("meta"))
    model(ids=torch.empty(2, dtype=torch.int64, device="meta"), x=torch.empty(2, device="meta"))
    assert model.seen == [("meta", "meta")]
    assert not torch.overrides._get_current_function_mode_stack()


def test_inputs_that_a_later_hook_moved_stay_on_host():
    """FSDP's hook of the root moves all inputs to the device."""

    def move(module, args, kwargs):
        return args, {name: value.to("meta") for name, value in kwargs.items()}

    model = keep_inputs_on_host(Seen().to("meta"))
    model.register_forward_pre_hook(move, with_kwargs=True, prepend=True)
    keep_inputs_from_fsdp(model)
    model(ids=torch.tensor([1, 2]), x=torch.empty(2, device="meta"))
    assert model.seen == [("cpu", "cpu")]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_their_inputs_on_host(clone):
    model = keep_inputs_on_host(Seen().to("meta"))
    copied = clone(model)
    copied(ids=torch.tensor([1, 2]), x=torch.empty(2, device="meta"))
    assert copied.seen == [("cpu", "cpu")]
    assert model.seen == []
    remove_hooks(copied)
    copied(ids=torch.tensor([1, 2]), x=torch.empty(2, device="meta"))
    assert copied.seen[-1] == ("cpu", "meta")


def test_apply_keeps_inputs_on_host_until_restore():
    model = build("qwen3_vl")
    hooks = len(model._forward_pre_hooks), len(model.model.language_model.layers[0]._forward_pre_hooks)
    opslot.apply(model, "eager")
    opslot.apply(model, "eager")
    assert len(model._forward_pre_hooks) == hooks[0] + 2
    opslot.restore(model)
    assert (len(model._forward_pre_hooks), len(model.model.language_model.layers[0]._forward_pre_hooks)) == hooks


def test_offsets_of_packed_documents_do_not_reach_towers():
    model = AutoModelForImageTextToText.from_config(build("qwen3_vl").config, attn_implementation="sdpa")
    opslot.apply(model, "auto")
    tower = model.model.visual
    given = []
    tower.blocks[0].register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    packing = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 4, "max_length_k": 4}
    tower(torch.randn(4, 3 * 2 * 4 * 4), grid_thw=torch.tensor([[1, 2, 2]]), **packing)
    assert given
    assert not packing.keys() & given[0].keys()
    opslot.restore(model)
    assert not tower._forward_pre_hooks


def test_device_copy_inside_the_mode():
    """Kernels need labels on the device, where the mode leaves them on the host."""
    labels, meta = torch.tensor([1, 2]), torch.device("meta")
    with _HostInputs():
        assert labels.to(meta).device.type == "cpu"
        assert device_copy(labels, meta).device == meta


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TOWERS)
def test_training_step_on_a_gpu_without_synchronization(name):
    batch = batch_of(name)
    model = AutoModelForImageTextToText.from_config(build(name).config, attn_implementation="sdpa")
    positions = {k: v for k, v in batch.items() if k not in ("pixel_values", "pixel_values_videos")}
    batch["position_ids"], _ = model.model.get_rope_index(**positions)
    batch["labels"] = batch["input_ids"]
    model.to("cuda", torch.bfloat16)
    opslot.apply(model, "auto")
    call = {k: v.to("cuda", torch.bfloat16) if v.is_floating_point() else v for k, v in batch.items()}
    assert_no_synchronization(model, call)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", FAMILIES)
def test_family_on_a_gpu_without_synchronization(name):
    model, batch = family(name)
    model.to("cuda", torch.bfloat16)
    opslot.apply(model, "auto")
    keep_inputs_on_host(model)
    call = moved(batch, "cuda", torch.bfloat16)
    assert_no_synchronization(model, call, use_cache=False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_compiled_layers_on_a_gpu_are_whole_graphs(name):
    """Those of towers, whose lengths of images are in no Python number, too."""
    model, batch = family(name)
    model.to("cuda", torch.bfloat16)
    opslot.apply(model, "auto")
    keep_inputs_on_host(model)
    opslot.parallelize(model, compile=True)
    torch._dynamo.reset()
    counters.clear()
    model(**moved(batch, "cuda", torch.bfloat16), use_cache=False).logits.sum().backward()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"]
