"""FP8 and MXFP4 checkpoints are dequantized while they are read, as Transformers dequantizes them."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import opslot
from opslot._base.errors import CheckpointError
from opslot.checkpoint import load_weights, save_weights, tensor_slice
from opslot.checkpoint.convert import convert_folder
from opslot.checkpoint.folder import read_folder
from opslot.checkpoint.quantized import QuantizedTensor, dequantized_entries, open_tensor, whole_tensor
from opslot.checkpoint.safetensors_file import MappedFile

BLOCK = (8, 8)
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def random_float8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8).to(dtype)


def random_scale(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 1e-4


def expanded(weight: Tensor, scale: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """The formula: element (i, j) times the scale of block (i // rows, j // columns)."""
    rows = torch.arange(weight.shape[-2]) // block[0]
    columns = torch.arange(weight.shape[-1]) // block[1]
    return weight.float() * scale.float()[..., rows[:, None], columns[None, :]]


def quantized(weight: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A float8 weight with the shape of `weight`, its block scales, and their product in bfloat16."""
    rows, columns = weight.shape
    values = random_float8(rows, columns, seed=seed)
    scale = random_scale(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]), seed=seed)
    return values, scale, expanded(values, scale).bfloat16()


def folder_of(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None, shards: int = 1) -> Path:
    """A checkpoint folder; with several shards, neighboring tensors are in different ones."""
    folder.mkdir(parents=True)
    names = list(tensors)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: files[i % shards] for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for i, file in enumerate(files):
        safetensors.torch.save_file({name: tensors[name].contiguous() for name in names[i::shards]}, folder / file)
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def read_all(folder: Path, config: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    entries = dequantized_entries(read_folder(folder), config or {}, folder, dtype)
    return {name: open_tensor(MappedFile(entry.file), entry) for name, entry in entries.items()}


SCALES = {
    "blocks": (torch.float8_e4m3fn, random_scale(3, 2), "w.weight_scale_inv"),
    "e5m2": (torch.float8_e5m2, random_scale(3, 2), "w.weight_scale_inv"),
    "tensor": (torch.float8_e4m3fn, random_scale(1)[0], "w.weight_scale"),
    "tensor of one": (torch.float8_e4m3fn, random_scale(1), "w.weight_scale_inv"),
    "rows": (torch.float8_e4m3fn, random_scale(24, 1), "w.weight_scale"),
    "e8m0": (torch.float8_e4m3fn, random_scale(3, 2).to(torch.float8_e8m0fnu), "w.scale"),
    "exponents": (torch.float8_e4m3fn, torch.randint(110, 130, (3, 2), dtype=torch.uint8), "w.weight_scale_inv"),
    "bfloat16": (torch.float8_e4m3fn, random_scale(3, 2).bfloat16(), "w.qscale_weight"),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_equals_transformers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    stored, scale, name = SCALES[kind]
    weight = random_float8(24, 16, dtype=stored)
    folder = folder_of(tmp_path / "x", {"w.weight": weight, name: scale, "w.input_scale": torch.ones(())})
    found = read_all(folder, {"quantization_config": FP8_CONFIG}, dtype)
    assert list(found) == ["w.weight"]
    grid = scale if scale.ndim > 1 else scale.reshape(1, 1)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, grid, dtype)
    value = found["w.weight"][slice(0, 24), slice(0, 16)]
    assert value.dtype == dtype
    assert torch.equal(value, wanted)


def test_edge_blocks_that_are_not_full(tmp_path: Path) -> None:
    """576 rows of DeepSeek-V3's kv_a_proj are 4.5 blocks of 128; 12 rows are 1.5 blocks of 8, not 2 blocks of 6."""
    for rows, columns in ((20, 21), (12, 9), (3, 8)):
        weight = torch.empty(rows, columns)
        values, scale, wanted = quantized(weight, rows)
        folder = folder_of(tmp_path / str(rows), {"w.weight": values, "w.weight_scale_inv": scale})
        tensor = read_all(folder, {"quantization_config": FP8_CONFIG}, torch.bfloat16)["w.weight"]
        assert torch.equal(tensor[slice(0, rows), slice(0, columns)], wanted)


def test_stacked_experts_with_a_scale_each(tmp_path: Path) -> None:
    values, scale = random_float8(3, 8, 6), random_scale(3)
    folder = folder_of(tmp_path / "x", {"experts.down_proj": values, "experts.down_proj_scale_inv": scale})
    tensor = read_all(folder)["experts.down_proj"]
    assert torch.equal(
        tensor[slice(1, 3), slice(0, 8), slice(2, 6)], (values.float() * scale[:, None, None])[1:, :, 2:]
    )


def test_packed_fp4_equals_transformers(tmp_path: Path) -> None:
    """DeepSeek-V4's experts: two e2m1 values per byte, and a scale in e8m0 per 32 columns."""
    packed = torch.randint(-128, 128, (6, 32), dtype=torch.int8)
    scale = random_scale(6, 2).to(torch.float8_e8m0fnu)
    folder = folder_of(tmp_path / "x", {"w1.weight": packed, "w1.scale": scale})
    tensor = read_all(folder, {"quantization_config": FP8_CONFIG})["w1.weight"]
    assert tensor.shape == (6, 64)
    assert torch.equal(
        tensor[slice(0, 6), slice(0, 64)], Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_equals_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(90, 140, (3, 10, 2), dtype=torch.uint8)
    folder = folder_of(tmp_path / "x", {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales})
    found = read_all(folder, {"quantization_config": MXFP4_CONFIG}, dtype)
    assert list(found) == ["experts.gate_up_proj"]
    value = found["experts.gate_up_proj"][slice(0, 3), slice(0, 64), slice(0, 10)]
    assert value.dtype == dtype
    assert torch.equal(value, convert_moe_packed_tensors(blocks, scales, dtype=dtype))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_any_region_can_be_read(tmp_path: Path, kind: str) -> None:
    """Regions that cut through blocks and through bytes of two values."""
    if kind == "fp8":
        tensors = {"w.weight": random_float8(3, 20, 21), "w.weight_scale_inv": random_scale(3, 3, 3)}
    else:
        blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
        tensors = {"w_blocks": blocks, "w_scales": torch.randint(120, 130, (3, 10, 2), dtype=torch.uint8)}
    folder = folder_of(tmp_path / "x", tensors)
    (tensor,) = read_all(folder, {"quantization_config": FP8_CONFIG}).values()
    whole = tensor[tuple(slice(0, n) for n in tensor.shape)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        cuts = [sorted(torch.randperm(n + 1, generator=generator)[:2].tolist()) for n in tensor.shape]
        region = tuple(slice(*cut) for cut in cuts)
        assert torch.equal(tensor[region], whole[region]), region


MISSING = {
    "FP8 scale": ({"a.weight": random_float8(8, 8)}, r"a.weight \(model.* is float8_e4m3fn.* lacks a.weight_scale_"),
    "FP8 weight": ({"a.weight_scale_inv": random_scale(1, 1)},
                   r"a.weight_scale_inv \(model.safetensors\) is float32, and the checkpoint lacks a.weight in float8"),
    "FP4 scale": ({"a.weight": torch.zeros(6, 32, dtype=torch.int8)},
                  r"a.weight \(model.safetensors\) is int8, and the checkpoint lacks a.scale"),
    "FP4 weight": ({"a.scale": random_scale(6, 2).to(torch.float8_e8m0fnu)},
                   r"a.scale \(model.safetensors\) is float8_e8m0fnu, and the checkpoint lacks a.weight in float8"),
    "FP8 weight of _scale": ({"a.weight_scale": random_scale(1, 1)},
                             r"a.weight_scale \(model.safetensors\) is float32, and the checkpoint lacks a.weight in "),
    "MXFP4 scales": ({"a_blocks": torch.zeros(1, 2, 2, 16, dtype=torch.uint8)}, r"a_blocks \(model.*lacks a_scales"),
    "MXFP4 blocks": ({"a_scales": torch.zeros(1, 2, 2, dtype=torch.uint8)}, r"a_scales \(model.*lacks a_blocks"),
    "FP8 grid": ({"a.weight": random_float8(8, 20), "a.weight_scale_inv": random_scale(3, 3)},
                 r"a.weight_scale_inv \(model.safetensors\): found \[3, 3\], which does not fit \[8, 20\] in "),
    "MXFP4 grid": ({"a_blocks": torch.zeros(1, 2, 2, 16, dtype=torch.uint8),
                    "a_scales": torch.zeros(1, 2, 3, dtype=torch.uint8)}, r"a_scales .*found \[1, 2, 3\], expect"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_missing_scale_is_one_error(tmp_path: Path, case: str) -> None:
    tensors, message = MISSING[case]
    folder = folder_of(tmp_path / "x", tensors, {"quantization_config": FP8_CONFIG})
    with pytest.raises(CheckpointError, match=rf"has quantized tensors that cannot be read:\n- {message}") as caught:
        load_weights(nn.Linear(2, 2), folder)
    assert "hint: add the missing shards" in str(caught.value)


def test_parameters_that_end_in_scale_are_not_those_of_a_tensor(tmp_path: Path) -> None:
    tensors = {"layer_scale": torch.ones(4), "a.scale": torch.ones(4), "bits": torch.ones(2, 4, dtype=torch.uint8)}
    folder = folder_of(tmp_path / "x", tensors, {"quantization_config": FP8_CONFIG})
    assert read_all(folder, {"quantization_config": FP8_CONFIG}).keys() == tensors.keys()


def test_missing_scales_are_listed_together(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "x", {f"{i}.weight": random_float8(8, 8) for i in range(12)})
    with pytest.raises(CheckpointError) as caught:
        load_weights(nn.Linear(2, 2), folder)
    assert str(caught.value).count("lacks") == 10
    assert "- and 2 more" in str(caught.value)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
@pytest.mark.parametrize("place", ["config", "text_config"])
def test_unknown_method_is_one_error(tmp_path: Path, method: str, place: str) -> None:
    config: dict[str, Any] = {"quantization_config": {"quant_method": method}}
    folder = folder_of(tmp_path / "x", {"weight": torch.ones(2, 2)}, config if place == "config" else {place: config})
    with pytest.raises(
        CheckpointError, match=rf"does not read\n  found: .*: {method}\n  hint: opslot reads fp8 and mxfp4"
    ):
        load_weights(nn.Linear(2, 2, bias=False), folder)


def deepseek(dtype: torch.dtype | None = None) -> Any:
    config = transformers.DeepseekV3Config(
        vocab_size=40, hidden_size=20, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, bos_token_id=1, eos_token_id=2, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(config).to(dtype or torch.float32)


def published_deepseek(folder: Path, shards: int = 1) -> tuple[Path, dict[str, Tensor]]:
    """DeepSeek-V3 as on the hub: linear layers in FP8, the router, norms, embedding and head in bfloat16.

    Returns the folder, and the same checkpoint in bfloat16.
    """
    deepseek(torch.bfloat16).save_pretrained(folder.with_name("plain"))
    plain = safetensors.torch.load_file(folder.with_name("plain") / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for i, (name, tensor) in enumerate(sorted(plain.items())):
        if name.endswith(("proj.weight", "proj_with_mqa.weight")):
            values, scale, plain[name] = quantized(tensor, i)
            tensors |= {name: values, f"{name}_scale_inv": scale}
        else:
            tensors[name] = tensor
    config = deepseek().config.to_dict() | {"quantization_config": FP8_CONFIG}
    safetensors.torch.save_file(plain, folder.with_name("plain") / "model.safetensors", {"format": "pt"})
    return folder_of(folder, tensors, config, shards), plain


def published_gpt_oss(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """gpt-oss as on the hub: experts in MXFP4, their biases and everything else in bfloat16."""
    config = transformers.GptOssConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(folder.with_name("plain"))
    plain = safetensors.torch.load_file(folder.with_name("plain") / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in sorted(plain.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(110, 125, (experts, rows, columns // 32), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales)
        else:
            tensors[name] = tensor
    safetensors.torch.save_file(plain, folder.with_name("plain") / "model.safetensors", {"format": "pt"})
    return folder_of(folder, tensors, config.to_dict() | {"quantization_config": MXFP4_CONFIG}), plain


PUBLISHED = {"deepseek_v3": published_deepseek, "gpt_oss": published_gpt_oss}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoint_loads_and_is_exported_in_bfloat16(tmp_path: Path, name: str) -> None:
    folder, plain = PUBLISHED[name](tmp_path / "hub")
    model = opslot.build_foundation_model(folder, folder, ops_implementation="eager")
    wanted = opslot.build_foundation_model(folder, tmp_path / "plain", ops_implementation="eager")
    for key, tensor in wanted.state_dict().items():
        assert tensor.dtype == model.state_dict()[key].dtype
        assert torch.equal(tensor, model.state_dict()[key]), key
    save_weights(model, tmp_path / "saved")
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[key]) and tensor.dtype != torch.uint8 for key, tensor in saved.items())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_float32_parameters_get_float32_products(tmp_path: Path) -> None:
    values, scale, _ = quantized(torch.empty(20, 21), 3)
    folder = folder_of(
        tmp_path / "x", {"weight": values, "weight_scale_inv": scale}, {"quantization_config": FP8_CONFIG}
    )
    model = nn.Linear(21, 20, bias=False)
    load_weights(model, folder)
    assert torch.equal(model.weight, expanded(values, scale))


def test_loaded_model_of_transformers_can_be_saved(tmp_path: Path) -> None:
    folder, plain = published_deepseek(tmp_path / "hub")
    model = deepseek().bfloat16()
    model.config.quantization_config = FP8_CONFIG
    load_weights(model, folder)
    save_weights(model, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in plain.items())


def test_overflow_of_a_product_is_an_error(tmp_path: Path) -> None:
    tensors = {"weight": torch.full((4, 4), 400.0).to(torch.float8_e4m3fn), "weight_scale_inv": torch.tensor([[1e3]])}
    folder = folder_of(tmp_path / "x", tensors)
    with pytest.raises(CheckpointError, match="values that overflow"):
        load_weights(nn.Linear(4, 4, bias=False).half(), folder)


def load_on_rank(folder: str, plain: str, sizes: dict[str, int]) -> int:
    """Compares each rank's shards; returns the bytes that it read."""
    from opslot.distributed import init_parallel_state
    from opslot.models import load_foundation_weights
    from opslot.models.parallelize import parallelize

    state = init_parallel_state(device_type="cpu", **sizes)
    models, read = [], []
    for source in (folder, plain):
        model = opslot.build_foundation_model(folder, init_device="meta", run_device="cpu", ops_implementation="eager")
        reports: list[Any] = []

        def load(model: Any, source: str = source, reports: list[Any] = reports) -> None:
            reports.append(load_foundation_weights(model, source, "cpu"))

        models.append(parallelize(model, state, load=load))
        read.append(reports[0].bytes_read)
    for (name, found), (_, wanted) in zip(models[0].named_parameters(), models[1].named_parameters()):
        found, wanted = (p.to_local() if isinstance(p, DTensor) else p for p in (found, wanted))
        assert torch.equal(found, wanted), name
    dist.barrier()
    return read[0]


@pytest.mark.quick("fsdp-gpt_oss", "ep-deepseek_v3")
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("sizes", [{}, {"ep": 2}], ids=["fsdp", "ep"])
def test_ranks_dequantize_their_shards(ranks, tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    folder, _ = PUBLISHED[name](tmp_path / "hub")
    nbytes = (folder / "model.safetensors").stat().st_size
    for read in ranks.run(load_on_rank, str(folder), str(tmp_path / "plain"), sizes):
        assert read < 0.75 * nbytes


def test_memory_is_the_model_and_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are dequantized in small pieces, each file is mapped once, and scales are not kept open."""
    mapped, opened, largest = weakref.WeakSet(), [], [0]

    class Counted(MappedFile):
        def __init__(self, file: Path) -> None:
            super().__init__(file)
            mapped.add(self)
            opened.append(file)

    read = QuantizedTensor.__getitem__

    def counted(tensor: QuantizedTensor, region: Any) -> Tensor:
        values = read(tensor, region)
        largest[0] = max(largest[0], values.numel())
        assert len(mapped) <= 1
        return values

    monkeypatch.setattr("opslot.checkpoint.load.MappedFile", Counted)
    monkeypatch.setattr(QuantizedTensor, "__getitem__", counted)
    monkeypatch.setattr(tensor_slice, "_PIECE_NUMEL", 50)
    folder, plain = published_deepseek(tmp_path / "hub", shards=3)
    model = opslot.build_foundation_model(folder, folder, ops_implementation="eager")
    assert torch.equal(model.model.layers[1].self_attn.o_proj.weight, plain["model.layers.1.self_attn.o_proj.weight"])
    assert 20 < largest[0] <= 50
    assert len(opened) == len(set(opened)) == 3


def test_convert_folder_dequantizes(tmp_path: Path) -> None:
    folder, plain = published_deepseek(tmp_path / "hub", shards=2)
    convert_folder(folder, tmp_path / "stacked", layout="stacked")
    convert_folder(tmp_path / "stacked", tmp_path / "back", layout="per_expert")
    found = safetensors.torch.load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in plain.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert "quantization_config" not in config


def test_plain_tensors_are_views(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "x", {"a": torch.randn(4, 3)}, {"quantization_config": FP8_CONFIG})
    (entry,) = dequantized_entries(read_folder(folder), {"quantization_config": FP8_CONFIG}, folder).values()
    mapped = MappedFile(entry.file)
    assert whole_tensor(mapped, entry).data_ptr() == mapped.view(entry).data_ptr()
