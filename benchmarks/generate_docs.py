"""Write the tables and plots of README.md and docs/ from committed results and patchgen.lock: the only source of their
numbers.

    python benchmarks/generate_docs.py [--check]

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. Every line of a table comes from one run. Cells:
the best implementation of a line is bold, whichever it is; "not measured" where the run did not include the library;
"-" where the library has no such kernel. `--check` changes nothing and exits with 1 where a file is out of date.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from opslot.bench.plots import draw
from opslot.bench.result import OpRow, Result, Run, StepRow, by_comparison, read
from opslot.bench.table import curve_text, significant
from opslot.patchgen.lock import Lock
from opslot.slots import KERNEL_REGISTRY
from opslot.verify.config_checks import ANYWHERE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BENCH, MEMORY, LORA = "bench_h200.json", "memory_h200.json", "lora_h200.json"
PARALLEL = ("parallel_h200x4.json", "parallel_h200x2.json", "parallel_h100x2.json")
CPU = ("cpu_epyc.json", "cpu_demo_step_epyc.json", "loading_epyc.json")
GEMM = "gemm_h200.json"
BALANCE = "balance_xeon.json"
LOADER = "media_loader_xeon.json"
DOCUMENTS = ("README.md", "docs/performance.md", "docs/architectures.md", "docs/fine_tuning.md", "docs/multimodal.md")
# Written by check_architectures.py.
ARCHITECTURES = ROOT / "benchmarks" / "architectures.json"
ON_A_GPU = ARCHITECTURES.with_name("architectures_cuda_bfloat16.json")
# Written by check_media.py.
MEDIA = ROOT / "benchmarks" / "media.json"

# By column, the implementations of a training step, of which the fastest is shown.
_STEP_COLUMNS: dict[str, tuple[str, ...]] = {
    "opslot": ("opslot",),
    "opslot + FP8": ("opslot + FP8",),
    "opslot + torch.compile": (
        "opslot + torch.compile",
        "opslot + compiled layers",
        "opslot + CUDA graphs",
        "opslot + layers as CUDA graphs",
    ),
    "VeOmni": ("VeOmni",),
    "Liger-Kernel": ("Liger-Kernel", "Liger-Kernel + FlashAttention 4"),
    "Transformers": ("Transformers", "Transformers + FlashAttention 4"),
    "Transformers + torch.compile": ("Transformers + torch.compile",),
}
_LORA_COLUMNS = ("opslot", "PEFT", "PEFT + Liger-Kernel", "Unsloth")
# What `--baselines` calls the library, or the distribution that must have been installed.
_MEASURED_WITH = {
    "VeOmni": "veomni",
    "Liger-Kernel": "liger",
    "quack": "quack",
    "fla": "fla-core",
    "FlashQLA": "flash-qla",
}
_OP_COLUMNS = (
    "opslot",
    "FlashAttention",
    "fla",
    "FlashQLA",
    "quack",
    "Liger-Kernel",
    "VeOmni",
    "PyTorch",
    "torch.compile",
    "Transformers",
)
# Op variants that VeOmni has kernels of its own for (`opslot.bench.baselines.veomni`).
_VEOMNI = (("moe_experts", "standard"), ("load_balancing_loss", "standard"))
# In the order of the tables.
_MODEL_LABELS = {
    "qwen3_8b_width": "Qwen3-8B width",
    "qwen3_0.6b": "Qwen3-0.6B, whole",
    "qwen3_0.6b_1x2048": "Qwen3-0.6B, whole, 1 x 2,048",
    "qwen3_0.6b_1x2048_graphs": "Qwen3-0.6B, whole, 1 x 2,048, another run",
    "qwen3_8b": "Qwen3-8B, whole",
    "llama3.1_8b_width": "Llama-3.1-8B width",
    "llama3.2_1b": "Llama-3.2-1B, whole",
    "llama_3b_width": "Llama-3.2-3B width",
    "qwen2.5_7b_width": "Qwen2.5-7B width",
    "mistral_7b_width": "Mistral-7B width, sliding window",
    "phi4_width": "Phi-4 width",
    "olmo3_7b_width": "OLMo-3-7B width",
    "gemma3_12b_width": "Gemma-3-12B width",
    "gemma2_9b_width": "Gemma-2-9B width",
    "qwen3_30b_a3b_width": "Qwen3-30B-A3B width",
    "qwen3_30b_a3b_width_2": "Qwen3-30B-A3B width, another run",
    "qwen3_30b_a3b_width_4": "Qwen3-30B-A3B width, 4 layers",
    "gpt_oss_20b_width": "gpt-oss-20b width",
    "gpt_oss_20b_width_2": "gpt-oss-20b width, another run",
    "moonlight_width": "Moonlight-16B-A3B width",
    "glm_4.5_air_width": "GLM-4.5-Air width",
    "mixtral_8x7b_width": "Mixtral-8x7B width, 4 layers",
    "lfm2_8b_a1b_width": "LFM2-8B-A1B width",
    "qwen3_next_80b_a3b_width": "Qwen3-Next-80B-A3B width, 4 layers",
    "qwen3.5_9b_width": "Qwen3.5-9B width",
    "qwen3.5_35b_a3b_width": "Qwen3.5-35B-A3B width, 4 layers",
    "qwen3_vl_8b_width": "Qwen3-VL-8B width",
    "qwen3_vl_30b_a3b_width": "Qwen3-VL-30B-A3B width",
    "qwen3_vl_30b_a3b_width_2": "Qwen3-VL-30B-A3B width, another run",
    "qwen3.5_9b_vision_width": "Qwen3.5-9B width with images",
    "qwen2.5_omni_7b_width": "Qwen2.5-Omni-7B width with images and audio",
    "qwen2.5_vl_7b_width": "Qwen2.5-VL-7B width",
    "nemotron_h_8b_width": "Nemotron-H-8B width",
    "granite4_h_tiny_width": "Granite-4.0-H-Tiny width",
}
# Ops whose memory matters as much as their time.
_WITH_MEMORY = ("cross_entropy_loss", "load_balancing_loss", "adamw")
_README_STEPS = (
    "qwen3_30b_a3b_width",
    "gpt_oss_20b_width",
    "glm_4.5_air_width",
    "qwen3.5_9b_width",
    "gemma3_12b_width",
    "qwen2.5_vl_7b_width",
    "qwen3_vl_8b_width",
    "qwen3_8b_width",
    "qwen3_0.6b",
)
_README_OPS = (
    ("moe_experts", "standard", "Qwen3-30B-A3B layer, T=16384"),
    ("cross_entropy_loss", "causal", "8192x4096x151936"),
)
_README_COLUMNS = ("opslot", "torch.compile", "VeOmni", "quack", "Liger-Kernel", "Transformers")
_PLOTTED_OPS = (
    ("rms_norm", "standard", "16384x4096"),
    ("rms_norm", "standard", "524288x128"),
    ("rms_norm", "fused_add", "16384x4096"),
    ("rotary_pos_emb", "full", "16384 tokens, 32 and 8 heads of 128"),
    ("rotary_pos_emb", "vision", "16384 patches, 16 heads of 72"),
    ("swiglu_mlp", "standard", "16384x12288"),
    ("moe_experts", "standard", "Qwen3-30B-A3B layer, T=16384"),
    ("moe_experts", "standard", "DeepSeek-V3 slice E=32, T=8192"),
    ("moe_experts", "biased", "gpt-oss-20b layer, T=8192"),
    ("cross_entropy_loss", "causal", "8192x4096x151936"),
    ("load_balancing_loss", "standard", "48 layers x 16384 x 128, top 8"),
    ("adamw", "standard", "128x1536x2048"),
    ("chunk_gated_delta_rule", "standard", "8192x32x128"),
    ("attention", "causal", "2 x 8192, 32/8 heads, D=128"),
    ("attention", "causal", "16384 in 16 documents, 32/8 heads, D=128"),
)
# The architecture of each model whose training step is measured.
_ARCH_OF_MODEL = {
    "qwen3_8b_width": "qwen3",
    "qwen3_30b_a3b_width": "qwen3_moe",
    "llama_3b_width": "llama",
    "mistral_7b_width": "mistral",
    "gemma3_12b_width": "gemma3",
    "glm_4.5_air_width": "glm4_moe",
    "gpt_oss_20b_width": "gpt_oss",
    "qwen3.5_9b_width": "qwen3_5",
    "qwen3.5_35b_a3b_width": "qwen3_5_moe",
    "llama3.1_8b_width": "llama",
    "phi4_width": "phi3",
    "olmo3_7b_width": "olmo3",
    "moonlight_width": "deepseek_v3",
    "nemotron_h_8b_width": "nemotron_h",
    "granite4_h_tiny_width": "granitemoehybrid",
}
# Columns of the table of architectures, and the ops in each.
_PARTS = {
    "norm": ("rms_norm", "layer_norm"),
    "rotary": ("rotary_pos_emb",),
    "MLP": ("swiglu_mlp",),
    "attention": ("attention",),
    "recurrence": ("chunk_gated_delta_rule", "mamba_chunk_scan", "causal_conv1d"),
    "experts": ("moe_experts",),
    "loss": ("cross_entropy_loss",),
}
_CHECKED = {"packing": "packed", "compile": "compiled", "sp": "sp", "ep": "ep"}
_Cell = tuple[str, float | None]


def load(name: str) -> Result:
    return _read(RESULTS / name)


_read = functools.cache(read)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def _best_bold(cells: Sequence[_Cell], best: Callable[[list[float]], float]) -> list[str]:
    numbers = [number for _, number in cells if number is not None]
    if len(numbers) < 2:
        return [text for text, _ in cells]
    return [f"**{text}**" if number is not None and number == best(numbers) else text for text, number in cells]


def _missing(library: str, op: str, variant: str, run: Run) -> _Cell:
    needed = _MEASURED_WITH.get(library)
    if library == "VeOmni" and (op, variant) not in _VEOMNI:
        needed = None
    elif library == "fla" and op == "chunk_gated_delta_rule":
        # On Hopper fla's gradients require TileLang.
        needed = "tilelang"
    included = needed is None or needed in run.baselines or needed in run.environment.versions
    return ("-" if included else "not measured"), None


# What libraries write of a model that they have no code for.
_UNSUPPORTED = (
    "No Modeling registered",
    "has no patches for this model",
    "does not support an attention implementation",
    # flash-linear-attention, which Transformers' code calls where it is installed.
    "on Hopper GPUs produces incorrect",
)


def _failure(text: str) -> str:
    # Not "out of resource: shared memory", of a kernel that does not fit.
    if "CUDA out of memory" in text or text.startswith(("OutOfMemoryError", "torch.OutOfMemoryError")):
        return "out of memory"
    if any(part in text for part in _UNSUPPORTED):
        return "not supported"
    return "timed out" if text.startswith("not done after") else "failed"


def _step_cell(implementation: str, rows: Sequence[StepRow]) -> _Cell:
    row = next((r for r in rows if r.implementation == implementation), None)
    if row is None:
        return "not measured", None
    if row.error or row.tokens_per_s is None:
        return _failure(row.error), None
    if not row.valid:
        return f"{row.tokens_per_s:,.0f}, loss {row.loss_difference} off", None
    memory = f", {row.peak_gib:.1f} GiB" if row.peak_gib is not None else ""
    mark = "*" if row.check.startswith("unchecked: Transformers") else ""
    return f"{row.tokens_per_s:,.0f}{mark}{memory}", row.tokens_per_s


def _fastest_step(names: Sequence[str], rows: Sequence[StepRow]) -> _Cell:
    """The cell of the fastest of several implementations, or of the first that was measured."""
    cells = [_step_cell(name, rows) for name in names if any(row.implementation == name for row in rows)]
    return max(cells or [_step_cell(names[0], rows)], key=lambda cell: cell[1] or 0.0)


def _op_cell(library: str, rows: Sequence[OpRow], run: Run) -> _Cell:
    """The library's fastest kernel with a passed check."""
    found = [r for r in rows if r.origin == library]
    valid = [r for r in found if r.valid]
    if not found:
        return _missing(library, rows[0].op, rows[0].variant, run)
    if not valid:
        checks = [r.check for r in found]
        unsupported = all(check.startswith(("unsupported", "unchecked")) for check in checks)
        return ("-" if unsupported else _failure(" ".join(checks))), None
    row = min(valid, key=lambda r: r.ms or 0.0)
    memory = f", {row.peak_mib / 1024:.2f} GiB" if row.op in _WITH_MEMORY and row.peak_mib is not None else ""
    return f"{significant(row.ms or 0.0)}{memory}", row.ms


def _label(model: str) -> str:
    return _MODEL_LABELS.get(model, model)


def how_fast() -> str:
    result = load(BENCH)
    lines = []
    for model in _README_STEPS:
        rows = [r for r in result.steps if r.model == model]
        names = {**_STEP_COLUMNS, "torch.compile": ("Transformers + torch.compile",)}
        cells = [_fastest_step(names[name], rows) if name in names else ("-", None) for name in _README_COLUMNS]
        lines.append([f"training step, {_label(model)}, tokens/s", *_best_bold(cells, max)])
    groups = by_comparison(result.ops)
    for comparison in _README_OPS:
        rows = groups.get(comparison, [])
        label = f"{comparison[0]}, {comparison[2]}, ms"
        if not rows:
            lines.append([label, *["not measured"] * len(_README_COLUMNS)])
            continue
        cells = [_op_cell(library, rows, result.run_of(rows[0])) for library in _README_COLUMNS]
        lines.append([label, *_best_bold(cells, min)])
    return _table(["", *_README_COLUMNS], lines)


def _place(model: str) -> int:
    """Of a model in the tables and plots of training steps; one without a label comes last."""
    return list(_MODEL_LABELS).index(model) if model in _MODEL_LABELS else len(_MODEL_LABELS)


def steps() -> str:
    result = load(BENCH)
    lines = []
    for model in sorted({r.model for r in result.steps}, key=_place):
        rows = [r for r in result.steps if r.model == model]
        cells = [_fastest_step(names, rows) for names in _STEP_COLUMNS.values()]
        lines.append([_label(model), *_best_bold(cells, max)])
    return _table(["tokens/s, peak memory", *_STEP_COLUMNS], lines)


def goals() -> str:
    rates = {value.name: value.value for run in load(GEMM).runs for value in run.values}
    lines = runpy.run_path(str(ROOT / "benchmarks" / "goals.py"))["lines"]
    found = lines(load(BENCH), rates["cuBLAS: rate"], ROOT / "benchmarks" / "models")
    header = ["", "goal", "measured", "to the goal", "step, ms", "at the goal, ms", "its matmuls, ms"]
    return _table(header, [[_label(model), *cells] for model, cells in found])


def towers() -> str:
    """Milliseconds of a training step with images, and those in its encoders, beside the fastest other library."""
    result = load(BENCH)
    lines = []
    for comparison in sorted({row.comparison for row in result.steps}, key=lambda key: _place(key[0])):
        rows = [row for row in result.steps if row.comparison == comparison and row.valid and row.vision_ms]
        own = next((row for row in rows if row.implementation == "opslot"), None)
        other = min((row for row in rows if not row.own), key=_ms, default=None)
        if own is None:
            continue
        name = other.implementation.partition(" + ")[0] if other else "not measured"
        lines.append([_label(own.model), *_tower_cells(own), name, *_tower_cells(other)])
    times = ["step", "vision", "audio"]
    return _table(["ms", *[f"opslot: {of}" for of in times], "fastest other library", *times], lines)


def _ms(row: StepRow) -> float:
    return row.ms or 0.0


def _tower_cells(row: StepRow | None) -> list[str]:
    """Times of the step, the vision and the audio encoder."""
    if row is None:
        return ["-", "-", "-"]
    audio = f"{row.audio_ms:.0f}" if row.audio_ms else "not measured" if row.audio_seconds else "-"
    return [f"{row.ms:.0f}", f"{row.vision_ms:.0f}", audio]


def curve() -> str:
    found = load(BENCH).curve
    return curve_text(found) + "." if found else "not measured"


def parallel() -> str:
    lines = [line for name in PARALLEL for line in _parallel_lines(load(name))]
    header = ["model", "GPUs", "parallelism", "batch", "implementation", "tokens/s per GPU, peak memory", "vs VeOmni"]
    return _table(header, lines)


def _parallel_lines(result: Result) -> Iterator[list[str]]:
    for key in dict.fromkeys(r.comparison for r in result.steps):
        rows = [r for r in result.steps if r.comparison == key]
        base = next((r.tokens_per_s for r in rows if r.implementation == "VeOmni" and r.tokens_per_s), None)
        for row in rows:
            speed, _ = _step_cell(row.implementation, [row])
            against = f"{row.tokens_per_s / base:.2f}" if base and row.tokens_per_s else "not measured"
            # "NVIDIA H200 sm_90"
            gpus = f"{row.gpus} {result.run_of(row).environment.device.split()[1]}"
            batch = f"{row.batch} x {row.length:,}"
            yield [_label(row.model), gpus, row.setup, batch, row.implementation, speed, against]


def memory() -> str:
    rows = load(MEMORY).steps
    lines = [
        [_label(r.model), r.setup, f"{r.length:,}", r.implementation, r.error or _step_cell(r.implementation, [r])[0]]
        for r in rows
    ]
    return _table(["model", "method", "tokens", "implementation", "tokens/s, peak memory"], lines)


def lora() -> str:
    if not (RESULTS / LORA).exists():
        return "Not measured."
    lines = []
    measured = load(LORA).steps
    for comparison in sorted(dict.fromkeys(row.comparison for row in measured), key=lambda key: _place(key[0])):
        rows = [row for row in measured if row.comparison == comparison]
        cells = [_step_cell(name, rows) for name in _LORA_COLUMNS]
        model, batch, length, setup, _ = comparison
        lines.append([_label(model), setup, f"{batch} x {length:,}", *_best_bold(cells, max)])
    return _table(["tokens/s, peak memory", "method", "batch", *_LORA_COLUMNS], lines)


def ops() -> str:
    result = load(BENCH)
    parts = []
    measured = by_comparison([row for row in result.ops if not _is_never_selected(row)])
    for op in dict.fromkeys(key[0] for key in measured):
        groups = {key: rows for key, rows in measured.items() if key[0] == op}
        origins = {r.origin for rows in groups.values() for r in rows} | {"VeOmni" for name, _ in _VEOMNI if name == op}
        columns = [name for name in _OP_COLUMNS if name in origins or name == "opslot"]
        lines = []
        for (_, variant, case), rows in groups.items():
            run = result.run_of(rows[0])
            cells = _best_bold([_op_cell(name, rows, run) for name in columns], min)
            roofline = next((r.roofline_ms for r in rows if r.roofline_ms), None)
            lines.append([f"{variant}, {case}", *cells, significant(roofline) if roofline else "-"])
        parts.append(f"### {op}\n\n{_table(['ms', *columns, 'roofline'], lines)}")
    absent = [name for name in KERNEL_REGISTRY.ops if name not in {key[0] for key in measured} and _timed(name)]
    if absent:
        parts.append(f"Not measured: {', '.join(absent)}.")
    return "\n\n".join(parts)


def _is_never_selected(row: OpRow) -> bool:
    """Whether the kernel is one of opslot's that `auto` never selects: for other numerics, or batch-invariant."""
    specs = KERNEL_REGISTRY.specs(row.op, row.variant)
    return row.origin == "opslot" and any(spec.name == row.kernel and spec.priority is None for spec in specs)


def _timed(op: str) -> bool:
    return any(case.role == "bench" for variant in KERNEL_REGISTRY.op(op).variants.values() for case in variant.cases)


def runs() -> str:
    lines = []
    for name in sorted(path.name for path in RESULTS.glob("*.json")):
        for run in load(name).runs:
            here = run.environment
            versions = ", ".join(f"{k} {v}" for k, v in here.versions.items())
            lines.append([f"`{name}`", here.device, here.date, f"`{here.commit}`", f"`{run.command}`", versions])
    return _table(["file", "device", "date", "commit", "command", "versions"], lines)


def values(*names: str, more: Sequence[Sequence[str]] = ()) -> str:
    """The values of results, then `more` lines of the same table."""
    lines = [
        [v.name, f"{significant(v.value)} {v.unit}", v.goal and f"{v.goal} {v.unit}"]
        for name in names
        for v in load(name).values
    ]
    return _table(["", "measured", "goal"], [*lines, *more])


def media_loader() -> str:
    """What a CPU loads, beside what an H200 trains on."""
    steps = [row for row in load(BENCH).steps if row.image_size and row.valid and row.implementation == "opslot"]
    trained = [[f"trained on: {_label(row.model)}", f"{1e3 * row.batch / _ms(row):.1f} samples/s", ""] for row in steps]
    return values(LOADER, more=trained)


def balance() -> str:
    """How long ranks wait for each other, by mix of data, model and ranks."""
    waits: dict[tuple[str, str, str], list[str]] = {}
    for value in load(BALANCE).values:
        case, _, _ = value.name.partition(": ")
        mix, model, ranks, _ = case.split(", ")
        waits.setdefault((mix, model, ranks), []).append(f"{100 * value.value:.2f} %")
    # The values of a case are with steps planned together, and without.
    lines = [[*case, *[f"{a} ({b})" for a, b in zip(cells[::2], cells[1::2])]] for case, cells in waits.items()]
    return _table(["data", "model", "", *[f"{n} micro batches" for n in (1, 4, 8)]], lines)


def architectures() -> str:
    """What opslot makes of each supported architecture, from patchgen.lock, the kit's outcome and measured steps."""
    lock = Lock.load(ROOT / "patchgen.lock")
    outcome = json.loads(ARCHITECTURES.read_text())
    newest = outcome["transformers"]
    lines = []
    for arch in sorted(lock.archs):
        checked = outcome["architectures"].get(arch, {"skipped": [], "checks": {}, "error": "not checked"})
        slots = [slot.rpartition(" ")[2] for slot in lock.expected_slots(arch, newest)]
        parts = [_part_cell(ops, slots, checked["skipped"]) for ops in _PARTS.values()]
        can = [_can_cell(checked["checks"].get(check)) for check in _CHECKED.values()]
        can.append(", ".join(_modalities(checked)))
        releases = sorted(lock.archs[arch], key=Version)
        first = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
        lines.append([f"`{arch}`", *parts, *can, _passed_cell(checked), first, _arch_step_cell(arch)])
    header = ["architecture", *_PARTS, *_CHECKED, "inputs", "checks", "locked releases", "H200 step, tokens/s"]
    title = f"{len(lines)} architectures, checked with transformers {newest} and torch {outcome['torch']}."
    return f"{title}\n\n{_table(header, lines)}\n\n{_elsewhere()}"


def _elsewhere() -> str:
    """How many model types pass each check with the kernels of a GPU, and which did not run there."""
    found = json.loads(ON_A_GPU.read_text())
    types = found["architectures"].values()
    supported = json.loads(ARCHITECTURES.read_text())["architectures"]
    known = {one["model_type"] for one in supported.values()} | {
        a for a, one in supported.items() if "with_images" in one
    }
    absent = sorted(known - found["architectures"].keys())
    counts = []
    for check in ANYWHERE:
        results = [one["checks"].get(check, ["without an outcome"])[0] for one in types]
        others = [
            f"{n} {other}" for other in ("failed", "unsupported", "without an outcome") if (n := results.count(other))
        ]
        counts.append(f"`{check}` passes for {results.count('passed')}" + (f" ({', '.join(others)})" if others else ""))
    packages = [
        f"{package} {' and '.join(sorted({one[package].partition('+')[0] for one in types}, key=Version))}"
        for package in ("transformers", "torch")
    ]
    return (
        f"On an {found['device']} in {found['dtype']}, with the kernels that `auto` selects there, of {len(types)} "
        f"model types: {', '.join(counts)}; {', '.join(packages)}."
        + (f" Not run there: {', '.join(f'`{name}`' for name in absent)}." if absent else "")
    )


def _modalities(checked: Mapping[str, Any]) -> list[str]:
    """What the checks gave the model; "mixed" samples have images and videos."""
    return [name for name in checked.get("samples", ["text"]) if name != "mixed"]


def unsupported() -> str:
    """Why some architectures cannot be packed or parallelized, and why some inputs were not checked."""
    outcome = json.loads(ARCHITECTURES.read_text())["architectures"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for arch, checked in sorted(outcome.items()):
        parts = {
            **checked["checks"],
            **{f"{name} with images": v for name, v in checked.get("with_images", {}).items()},
        }
        for name, (result, detail) in parts.items():
            if result == "unsupported" and not detail.endswith("has no experts"):
                reasons.setdefault((name, detail.partition(": ")[2] or detail), []).append(arch)
        for name, reason in checked.get("missing", {}).items():
            if not reason.startswith("it takes no"):
                reasons.setdefault((f"input {name}", reason), []).append(arch)
    rows = [[name, ", ".join(f"`{arch}`" for arch in archs), why] for (name, why), archs in sorted(reasons.items())]
    return _table(["what", "architectures", "because"], rows)


def media() -> str:
    """Model types with images, video or audio, and what works."""
    data = json.loads(MEDIA.read_text())
    lines = []
    for name, found in data["types"].items():
        kinds = [kind for kind in found["samples"] if kind not in ("text", "mixed")]
        failed = [check for check, (result, _) in found["checks"].items() if result == "failed"]
        outcome = "not checked" if not kinds else f"failed: {', '.join(failed)}" if failed else "passed"
        packing = _can_cell(found["checks"].get("packed")) if kinds else "not checked"
        absent = {why for kind, why in found["missing"].items() if not why.startswith("it takes no")}
        reason = found["error"] or "; ".join(sorted(absent)) or _reason(found["checks"], failed)
        row = [f"`{name}`", ", ".join(kinds) or "-", outcome, packing, found["processor"] or "-", reason or "-"]
        lines.append([cell.replace("|", "\\|") for cell in row])
    header = ["model type", "checked", "checks", "packing", "with its processor", "because"]
    return f"Checked with transformers {data['transformers']}.\n\n{_table(header, lines)}"


def _reason(checks: Mapping[str, Sequence[str]], failed: Sequence[str]) -> str:
    shown = failed or [check for check, (result, _) in checks.items() if result == "unsupported"]
    return "; ".join(f"{check}: {checks[check][1]}" for check in shown)


def _part_cell(ops: Sequence[str], slots: Sequence[str], skipped: Sequence[str]) -> str:
    variants = sorted({slot.partition("/")[2] for slot in slots if slot.partition("/")[0] in ops})
    kept = ["Transformers"] if any(op in skipped for op in ops) else []
    return ", ".join([*variants, *kept]) or "-"


def _can_cell(outcome: Sequence[str] | None) -> str:
    if outcome is None:
        return "not checked"
    result, detail = outcome
    if result == "unsupported":
        return "-" if detail.endswith("has no experts") else "no"
    return "yes" if result == "passed" else "failed"


def _passed_cell(checked: Mapping[str, Any]) -> str:
    every = [*checked["checks"].items(), *checked.get("with_images", {}).items()]
    failed = list(dict.fromkeys(name for name, (result, _) in every if result == "failed"))
    if checked["error"] or not checked["checks"]:
        return "not checked"
    return f"failed: {', '.join(failed)}" if failed else "passed"


def _arch_step_cell(arch: str) -> str:
    """opslot in bf16 beside the fastest other library."""
    result = load(BENCH)
    cells = []
    for model in dict.fromkeys(row.model for row in result.steps):
        rows = [row for row in result.steps if row.model == model and row.valid and row.tokens_per_s]
        ours = [row for row in rows if row.own and row.implementation != "opslot + FP8"]
        if _ARCH_OF_MODEL.get(model) != arch or not ours:
            continue
        others = [row for row in rows if not row.own]
        text = f"{_label(model)}: {max(row.tokens_per_s or 0.0 for row in ours):,.0f}"
        if others:
            best = max(others, key=lambda row: row.tokens_per_s or 0.0)
            text += f" ({best.implementation} {best.tokens_per_s:,.0f})"
        cells.append(text)
    return "; ".join(cells) or "-"


def skipped() -> str:
    """The parts that keep Transformers' implementation, and why."""
    lines = [
        [op, ", ".join(f"`{pattern}`" for pattern in patterns), reason]
        for op, reasons in runpy.run_path(str(ROOT / "benchmarks" / "allowed_skips.py"))["ALLOWED"].items()
        for reason, patterns in reasons.items()
    ]
    return _table(["op", "symbols", "because it"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "architectures": architectures,
    "skipped": skipped,
    "media": media,
    "unsupported": unsupported,
    "how_fast": how_fast,
    "steps": steps,
    "goals": goals,
    "towers": towers,
    "curve": curve,
    "parallel": parallel,
    "memory": memory,
    "lora": lora,
    "ops": ops,
    "gemm": lambda: values(GEMM),
    "cpu": lambda: values(*CPU),
    "balance": balance,
    "media_loader": media_loader,
    "runs": runs,
}
_BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def generated(text: str) -> str:
    """A document with every table written again."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", text)


def plots() -> Iterator[tuple[Path, Result]]:
    """The plots of docs/ and what each shows."""
    result = load(BENCH)
    chosen = [replace(run, ops=[r for r in run.ops if r.comparison in _PLOTTED_OPS]) for run in result.runs]
    order = {comparison: i for i, comparison in enumerate(_PLOTTED_OPS)}
    for run in chosen:
        run.ops.sort(key=lambda r: order[r.comparison])
    chosen = [replace(run, steps=[], curve=None) for run in chosen if run.ops]
    chosen.sort(key=lambda run: order[run.ops[0].comparison])
    yield ROOT / "docs" / "ops.png", replace(result, runs=chosen)
    trained = [
        replace(
            run,
            ops=[],
            steps=[
                replace(row, model=_label(row.model))
                for row in sorted(run.steps, key=lambda row: _place(row.model))
                if row.model in _README_STEPS
            ],
        )
        for run in sorted(result.runs, key=lambda run: min([_place(row.model) for row in run.steps], default=1000))
        if run.steps or run.curve
    ]
    yield ROOT / "docs" / "training_step.png", replace(result, runs=trained)


def digest(result: Result) -> str:
    """Identifies what a plot shows; written into the PNG."""
    return hashlib.sha256(repr(result).encode()).hexdigest()


def drawn_digest(path: Path) -> str | None:
    """The digest in a PNG."""
    from PIL import Image

    with Image.open(path) as image:
        return getattr(image, "text", {}).get("Source")


def outdated() -> list[str]:
    """The documents and plots that differ from what the results say."""
    texts = [name for name in DOCUMENTS if generated((ROOT / name).read_text()) != (ROOT / name).read_text()]
    return texts + [path.name for path, shown in plots() if not path.exists() or drawn_digest(path) != digest(shown)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a file is out of date")
    if parser.parse_args().check:
        found = outdated()
        print("\n".join(f"{name} is out of date" for name in found) or "up to date")
        return 1 if found else 0
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(generated(path.read_text()))
    for path, shown in plots():
        draw(shown, path, {"Source": digest(shown)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
