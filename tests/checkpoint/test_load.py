from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from opslot._base.errors import CheckpointError
from opslot.checkpoint import load_weights, save_weights
from opslot.checkpoint.experts import ExpertTensorConverter
from opslot.checkpoint.safetensors_file import MappedFile
from tests.equal import assert_equal_tensors

INDEX = "model.safetensors.index.json"


def read_all(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(file)
    return tensors


def rewrite(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a checkpoint in one file, with its tensors changed by `change`."""
    tensors = read_all(source)
    change(tensors)
    folder.mkdir()
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def fuse(tensors: dict[str, Tensor], *, transposed: bool = False) -> None:
    """Convert per-expert tensors to stacked ones with plain torch."""
    for prefix in sorted({name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}):

        def pop(projection: str, prefix: str = prefix) -> Tensor:
            return torch.stack([tensors.pop(f"{prefix}.{e}.{projection}.weight") for e in range(4)])

        gate_up = torch.cat([pop("gate_proj"), pop("up_proj")], dim=1)
        down = pop("down_proj")
        tensors[f"{prefix}.gate_up_proj"] = gate_up.mT if transposed else gate_up
        tensors[f"{prefix}.down_proj"] = down.mT if transposed else down


@pytest.mark.quick("*-qwen3_moe", "meta-True-seed_oss", "cpu-False-llama")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "seed_oss", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loads_like_from_pretrained(tmp_path, make_model, architecture: str, tied: bool, device: str) -> None:
    make_model(architecture, tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size="8KB")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = make_model(architecture, seed=1, device=device, tie_word_embeddings=tied)
    report = load_weights(ours, tmp_path)
    assert_equal_tensors(ours, theirs)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert report.tensors == len(json.loads((tmp_path / INDEX).read_text())["weight_map"])
    assert report.bytes_read == sum(p.nbytes for p in ours.parameters())
    assert (report.missing, report.extra) == ([], [])
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(ours.eval()(tokens).logits, theirs.eval()(tokens).logits)


@pytest.mark.parametrize("layout", ["per_expert", "stacked", "transposed"])
def test_loads_experts_of_each_layout(tmp_path, moe_folder, make_model, layout: str) -> None:
    folder = moe_folder
    if layout != "per_expert":
        folder = rewrite(moe_folder, tmp_path / layout, lambda t: fuse(t, transposed=layout == "transposed"))
    model = make_model("qwen3_moe", seed=1)
    report = load_weights(model, folder)
    assert_equal_tensors(model, make_model("qwen3_moe"))
    assert report.layouts == {"model.layers.*.mlp.experts": layout}


def test_loads_the_stacked_folder_that_transformers_saves(tmp_path, make_model) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path, save_original_format=False)
    model = make_model("qwen3_moe", device="meta")
    assert load_weights(model, tmp_path).layouts == {"model.layers.*.mlp.experts": "stacked"}
    assert_equal_tensors(model, make_model("qwen3_moe"))


def test_square_stacked_tensors_are_distinguished_by_their_pair(tmp_path, make_model) -> None:
    """H = 2I: gate_up_proj has the same shape in both layouts, down_proj has not."""
    sizes = {"moe_intermediate_size": 8, "hidden_size": 16}
    make_model("qwen3_moe", **sizes).save_pretrained(tmp_path / "a")
    for transposed in (False, True):
        folder = rewrite(tmp_path / "a", tmp_path / str(transposed), lambda t: fuse(t, transposed=transposed))  # noqa: B023
        model = make_model("qwen3_moe", seed=1, **sizes)
        load_weights(model, folder)
        assert_equal_tensors(model, make_model("qwen3_moe", **sizes))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_casts_to_the_dtype_of_the_parameters(moe_folder, make_model, device) -> None:
    wanted, model = make_model("qwen3_moe"), make_model("qwen3_moe", seed=1, device=device).to(torch.bfloat16)
    load_weights(model, moe_folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted.get_parameter(name).to(torch.bfloat16)), name


def test_keeps_parameter_objects_that_have_memory(moe_folder, make_model) -> None:
    """An optimizer created before loading still has the parameters."""
    model = make_model("qwen3_moe", seed=1)
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    load_weights(model, moe_folder)
    assert before == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}


def test_head_and_base_model_checkpoints(tmp_path, moe_folder, make_model) -> None:
    base = make_model("qwen3_moe", "Model", seed=1)
    with pytest.raises(CheckpointError, match=r"tensors that the model does not have \(1\):\n  - lm_head.weight"):
        load_weights(base, moe_folder)
    report = load_weights(base, moe_folder, allow_extra=["lm_head.weight"])
    assert report.extra == ["lm_head.weight"]
    assert_equal_tensors(base, make_model("qwen3_moe").model)

    make_model("qwen3_moe", tie_word_embeddings=True).model.save_pretrained(tmp_path / "base")
    head = make_model("qwen3_moe", seed=1, tie_word_embeddings=True)
    load_weights(head, tmp_path / "base")
    assert_equal_tensors(head, make_model("qwen3_moe", tie_word_embeddings=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_missing_head_is_initialized_only_if_allowed(moe_folder, make_model, device: str) -> None:
    model = make_model("qwen3_moe", "ForSequenceClassification", seed=1, device=device)
    with pytest.raises(CheckpointError, match=r"that the checkpoint does not have \(1\):\n  - score.weight \[2, 16\]"):
        load_weights(model, moe_folder, allow_extra=["lm_head.weight"])
    torch.manual_seed(3)
    report = load_weights(model, moe_folder, allow_missing=["score.*"], allow_extra=["lm_head.weight"])
    assert report.missing == ["score.weight"]
    assert "initialized randomly: score.weight" in str(report)
    weight = model.score.weight.detach()
    assert 0 < weight.abs().max() < 0.2, "normal with std 0.02"
    assert torch.equal(model.model.norm.weight, make_model("qwen3_moe").model.norm.weight)


def test_what_may_be_missing_or_extra_is_reported(tmp_path, moe_folder, make_model) -> None:
    folder = rewrite(moe_folder, tmp_path / "x", lambda t: t.update(stray=t.pop("model.norm.weight")))
    model = make_model("qwen3_moe", seed=1)
    report = load_weights(model, folder, allow_missing=["*"], allow_extra=["*"])
    assert (report.missing, report.extra) == (["model.norm.weight"], ["stray"])
    assert torch.equal(model.model.norm.weight.detach(), torch.ones(16))


def test_old_rotary_buffers_are_ignored(tmp_path, moe_folder, make_model) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.rotary_emb.inv_freq"] = torch.ones(4)

    model = make_model("qwen3_moe", device="meta")
    load_weights(model, rewrite(moe_folder, tmp_path / "x", add))
    assert torch.equal(model.model.rotary_emb.inv_freq, make_model("qwen3_moe").model.rotary_emb.inv_freq)


def test_tied_tensor_may_be_stored_twice(tmp_path, make_model) -> None:
    make_model("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "a")
    model = make_model("qwen3", seed=1, tie_word_embeddings=True)
    twice = rewrite(
        tmp_path / "a", tmp_path / "b", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    load_weights(model, twice)
    assert_equal_tensors(model, make_model("qwen3", tie_word_embeddings=True))
    differing = rewrite(twice, tmp_path / "c", lambda t: t["lm_head.weight"][0].add_(1))
    with pytest.raises(CheckpointError, match=r"tied tensors with different values(?s:.*)tie_word_embeddings: false"):
        load_weights(model, differing)


def test_wrapped_modules_have_clean_fqns(moe_folder, make_model) -> None:
    model = make_model("qwen3_moe", seed=1)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    load_weights(model, moe_folder)
    model.model.layers[0] = model.model.layers[0]._orig_mod
    assert_equal_tensors(model, make_model("qwen3_moe"))


class Doubling:
    """A converter that collects inputs: pairs `a`, `b` become `joined`."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def can_handle(self, name: str) -> bool:
        return name in ("a", "b")

    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        self.held[name] = tensor
        if len(self.held) < 2:
            return None
        return [("joined", torch.cat([self.held.pop("a"), self.held.pop("b")]))]

    def finalize(self) -> list[tuple[str, Tensor]]:
        if self.held:
            raise CheckpointError(f"unpaired: {', '.join(self.held)}")
        return []


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Parameter(torch.zeros(5, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def save(folder: Path, **tensors: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def test_converter_that_joins_tensors(tmp_path: Path) -> None:
    model, converter = Joined(), Doubling()
    a, b, count = torch.randn(2, 2), torch.randn(3, 2), torch.tensor(7)
    load_weights(model, save(tmp_path / "x", a=a, b=b, count=count), converters=[converter])
    assert torch.equal(model.joined, torch.cat([a, b]))
    assert model.count == 7
    assert converter.held == {}

    untouched = Joined()
    for tensors, message in (
        ({"a": a}, "unpaired: a"),
        ({"a": a, "b": b[:2].clone()}, r"joined: found \[4, 2\], expected \[5, 2\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_weights(untouched, save(tmp_path / "x", count=count, **tensors), converters=[Doubling()])
        assert not untouched.joined.any()


class Renaming:
    def __init__(self, mapped: Any) -> None:
        self.mapped, self.seen = mapped, []

    def __deepcopy__(self, memo: Any) -> Any:
        return Renaming(self.mapped)

    def can_handle(self, name: str) -> bool:
        return True

    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        self.seen.append(len(self.mapped))
        return [(name.replace("old", "new"), tensor)]

    def finalize(self) -> list[tuple[str, Tensor]]:
        return []


def test_converter_gets_one_file_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a mapped file stay in memory: peak memory must be model and one shard, not model and checkpoint."""
    mapped, opened = weakref.WeakSet(), []

    class Counted(MappedFile):
        def __init__(self, file: Path) -> None:
            super().__init__(file)
            mapped.add(self)
            opened.append(file)

    monkeypatch.setattr("opslot.checkpoint.load.MappedFile", Counted)
    tensors = {f"old.{i}": torch.randn(3, 4) for i in range(6)}
    save_weights(tensors, tmp_path / "x", max_shard_size=2 * 3 * 4 * 4)
    model = nn.Module()
    model.new = nn.ParameterList(torch.zeros(3, 4) for _ in range(6))
    converter = Renaming(mapped)
    load_weights(model, tmp_path / "x", converters=[converter])
    assert all(torch.equal(model.new[i], tensors[f"old.{i}"]) for i in range(6))
    assert len(opened) == len(set(opened)) == 3
    assert converter.seen == [1] * 6


class Again(Doubling):
    """Returns a target that it has already returned."""

    def finalize(self) -> list[tuple[str, Tensor]]:
        return [("joined", torch.zeros(5, 2))]


class ByValue(Doubling):
    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        return super().convert(name, tensor) if tensor.sum() else None


@pytest.mark.parametrize(
    ("converter", "more", "message"),
    [
        (
            Again,
            {},
            r"a converter and another source fill \(1\):\n  - joined\n    hint: return each",
        ),
        (Doubling, {"joined": torch.zeros(5, 2)}, r"a converter and another source fill \(1\):\n  - joined"),
        (
            ByValue,
            {},
            r"ByValue.convert\('a'\) failed on meta tensors.*\n.*RuntimeError: .*\n  hint:",
        ),
    ],
)
def test_invalid_converters_raise(tmp_path: Path, converter: Any, more: Any, message: str) -> None:
    model = Joined()
    folder = save(tmp_path / "x", a=torch.ones(2, 2), b=torch.ones(3, 2), count=torch.tensor(7), **more)
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, folder, converters=[converter()])
    assert not model.joined.any()


def test_meta_buffers_without_values_raise(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Joined()
    folder = save(tmp_path / "x", joined=torch.ones(5, 2), count=torch.tensor(1))
    with pytest.raises(CheckpointError, match=r"cannot initialize by itself \(1\):\n- cache"):
        load_weights(model, folder)


def expert(number: int, projection: str, layer: int = 1) -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.{projection}.weight"


def half_stacked(tensors: dict[str, Tensor]) -> None:
    other = dict(tensors)
    fuse(other)
    for name in [name for name in tensors if ".layers.0.mlp.experts" in name]:
        del tensors[name]
    tensors |= {name: tensor for name, tensor in other.items() if ".layers.0.mlp.experts" in name}


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (
        lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"),
        r"parameters that the checkpoint does not have \(1\):\n  - model.layers.1.self_attn.q_norm.weight \[8\]",
    ),
    "extra": (lambda t: t.update(stray=torch.ones(2)), r"tensors that the model does not have \(1\):\n  - stray"),
    "other shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(17)}),
        r"tensors of another shape \(1\):\n  - model.norm.weight: found \[17\], expected \[16\]",
    ),
    "other shape expert": (
        lambda t: t.update({expert(2, "up_proj"): torch.ones(16, 12)}),
        r"experts.2.up_proj.weight: found \[16, 12\], expected \[12, 16\]",
    ),
    "partial expert": (
        lambda t: (t.pop(expert(3, "up_proj")), t.pop(expert(0, "down_proj"))),
        r"incomplete experts \(2\):\n.*\.1\.mlp\.experts: expert 0 lacks down_proj\n.*expert 3 lacks up_proj",
    ),
    "layer without experts": (
        lambda t: [t.pop(name) for name in list(t) if "layers.1.mlp.experts" in name],
        r"that the checkpoint does not have \(2\):\n  - model.layers.1.mlp.experts.gate_up_proj",
    ),
    "too many experts": (
        lambda t: t.update({expert(4, "up_proj"): torch.ones(12, 16)}),
        "experts.4.up_proj.weight: the model has 4 experts",
    ),
    "mixed": (half_stacked, "mixed layouts"),
    "quantised": (
        lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}),
        r"cannot be converted \(1\):\n  - model.norm.weight: found torch.int8, the model holds torch.float32",
    ),
    "eight-bit float": (
        lambda t: t.update({"model.norm.weight": torch.ones(16).to(torch.float8_e4m3fn)}),
        r"model.norm.weight \(model.*\) is float8_e4m3fn, and the checkpoint lacks model.norm.weight_scale_inv",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_mismatches_raise_and_change_nothing(tmp_path, moe_folder, make_model, misfit: str) -> None:
    change, message = MISFITS[misfit]
    folder = rewrite(moe_folder, tmp_path / "x", change)
    model = make_model("qwen3_moe", seed=1)
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, folder)
    assert_equal_tensors(model, make_model("qwen3_moe", seed=1))


def test_one_error_lists_everything_and_is_short(tmp_path, moe_folder, make_model) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors |= {f"stray.{i:02}": torch.ones(1) for i in range(25)}
        tensors["lm_head.weight"] = torch.ones(3)

    with pytest.raises(CheckpointError) as caught:
        load_weights(make_model("qwen3_moe"), rewrite(moe_folder, tmp_path / "x", change))
    text = str(caught.value)
    assert "does not fit Qwen3MoeForCausalLM" in text
    for part in ("model.norm.weight [16]", "(25)", "- and 15 more", "lm_head.weight: found [3], expected [40, 16]"):
        assert part in text
    assert text.count("stray.") == 10


def test_converters_are_optional_or_with_a_layout(moe_folder, make_model) -> None:
    model = make_model("qwen3_moe", seed=1)
    with pytest.raises(CheckpointError, match=r"that the model does not have \(24\)"):
        load_weights(model, moe_folder, converters=[])
    with pytest.raises(CheckpointError, match="per_expert, not stacked"):
        load_weights(model, moe_folder, converters=[ExpertTensorConverter.for_model(model, "stacked")])
    load_weights(model, moe_folder, converters=[ExpertTensorConverter.for_model(model, "per_expert")])


def test_whole_weights_are_given_to_modules_that_quantize(tmp_path: Path) -> None:
    """One after the other, never all at once; the slices of a weight may come in several files."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Quantizing(nn.Linear):
        def load_weight(self, weight: Tensor, device: Any) -> None:
            nonlocal most
            alive.append(weakref.ref(weight))
            most = max(most, sum(ref() is not None for ref in alive))
            self.weight = nn.Parameter(weight.sign().to(device), requires_grad=False)

    model = nn.ModuleDict({f"layer{i}": Quantizing(4, 3, device="meta") for i in range(40)})
    model["norm"] = nn.LayerNorm(3, device="meta")
    tensors = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    load_weights(model, tmp_path, device="cpu")
    for name, parameter in model.named_parameters():
        expected = tensors[name].sign() if "layer" in name and name.endswith("weight") else tensors[name]
        assert torch.equal(parameter, expected)
    assert len(alive) == 40
    assert most <= 8
