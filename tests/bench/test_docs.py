"""Every measured number of README.md and docs/ is generated from the committed results."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from opslot import KERNEL_REGISTRY
from opslot.bench.result import Environment, OpRow, Result, Run, StepRow, read

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").iterdir())
# A number with a unit of time, speed or size, or a percentage.
MEASURED = re.compile(
    r"(?<![\w.])\d[\d.,]*\s*(ns|us|ms|s|GiB|GB|MiB|TB/s|W|%|x|times|tokens/s|tok/s|TFLOP/s)(?=[\s.,;:)|*]|$)"
)

# Limits, settings and sizes that the code has.
NOT_MEASURED = {
    "docs/installation.md": {"5.x"},
    "docs/kernels.md": {"32 MiB", "8 %"},
    "docs/library.md": {"5 %"},
    "docs/multimodal.md": {"1024 x"},
    "docs/training.md": {"2 %", "5 %", "4 MiB", "16 MiB", "256 MiB"},
}


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "benchmarks" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_and_plots_match_the_results(docs):
    assert docs.outdated() == [], "run: python benchmarks/generate_docs.py"


def test_every_table_is_used_once(docs):
    found = [name for document in docs.DOCUMENTS for _, name, _ in docs._BLOCK.findall((ROOT / document).read_text())]
    assert sorted(found) == sorted(docs.TABLES)


def test_no_measured_number_outside_generated_tables(docs):
    texts = {f"docs/{file.name}": file.read_text() for file in (ROOT / "docs").glob("*.md")}
    _, _, texts["README.md"] = (ROOT / "README.md").read_text().partition("## Speed")
    for document, text in texts.items():
        found = {" ".join(match[0].split()) for match in MEASURED.finditer(docs._BLOCK.sub("", text))}
        assert found == NOT_MEASURED.get(document, set()), document
    assert MEASURED.search("opslot takes 6.5 ms")


def test_files_of_results_in_the_readme_exist():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"benchmarks/results/(\w+\.json)", text))
    assert named <= {file.name for file in RESULTS}


def test_changed_result_is_detected(docs, tmp_path, monkeypatch):
    for file in RESULTS:
        text = file.read_text()
        (tmp_path / file.name).write_text(text.replace('"tokens_per_s": 4', '"tokens_per_s": 5'))
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    assert docs.outdated() == [
        "README.md",
        "docs/performance.md",
        "docs/architectures.md",
        "training_step.png",
    ]


def test_model_types_that_did_not_run_on_a_gpu_are_named(docs, tmp_path, monkeypatch):
    data = json.loads(docs.ON_A_GPU.read_text())
    count = len(data["architectures"])
    del data["architectures"]["llama"]
    (tmp_path / "gpu.json").write_text(json.dumps(data))
    monkeypatch.setattr(docs, "ON_A_GPU", tmp_path / "gpu.json")
    text = docs._elsewhere()
    total, passed = map(int, re.search(r"of (\d+) model types: `auto` passes for (\d+),", text).groups())
    assert passed == total == count - 1
    assert re.search(r"Not run there: .*`llama`.*\.$", text)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_committed_results_match_the_schema(docs, file):
    result = read(file)
    assert result.runs, "every file holds a run"
    rows = {(row.op, row.variant) for row in result.ops if row.op in KERNEL_REGISTRY.ops}
    assert not {(op, variant) for op, variant in rows if variant not in KERNEL_REGISTRY.op(op).variants}
    assert re.fullmatch(r"\w+_(h200|h\d00x\d|epyc|xeon)\.json", file.name), "<script>_<machine>.json"
    script = result.script.split()[-1]
    assert file.name.startswith(Path(script).stem)
    shown = {docs.BENCH, docs.MEMORY, docs.LORA, docs.GEMM, docs.BALANCE, docs.LOADER, *docs.PARALLEL, *docs.CPU}
    assert file.name in shown, "no result is stale"
    for run in result.runs:
        assert not run.empty
        assert run.environment.commit
        assert not re.search(r"[ =]/", run.command), "no path of a machine"


def result_of(baselines, ops=(), steps=()):
    machine = Environment("GPU", "cpu", 1, "3.12", {"torch": "2.11"}, "abc", "2026-11-20")
    return Result("opslot bench", [Run("opslot bench", machine, list(baselines), list(ops), list(steps))])


def test_cells_name_unmeasured_values(docs, monkeypatch):
    experts = ("moe_experts", "standard", "Qwen3-30B-A3B layer, T=16384")
    rows = [
        OpRow(*experts, "eager", "bfloat16", 9.0, check="ok"),
        OpRow(*experts, "fused_triton", "bfloat16", 7.0, check="ok"),
        OpRow(*experts, "fused_quack", "bfloat16", 5.0, check="WRONG out"),
        OpRow(*experts, "hf: grouped_mm", "bfloat16", 8.0, check="ok"),
        OpRow(*experts, "liger: x", "bfloat16", check="OutOfMemoryError: CUDA out of memory"),
    ]
    steps = [
        StepRow("qwen3_8b_width", "opslot", 2, 8192, tokens_per_s=4e4, peak_gib=34.5, check="ok"),
        StepRow(
            "qwen3_8b_width",
            "Transformers",
            2,
            8192,
            tokens_per_s=5e4,
            check="WRONG: a loss differs by 1.3% from opslot eager",
        ),
        StepRow("qwen3_8b_width", "VeOmni", 2, 8192, error="OutOfMemoryError"),
    ]
    for baselines, veomni in (((), "not measured"), (("veomni",), "-")):
        monkeypatch.setattr(docs, "load", lambda name, given=baselines: result_of(given, rows, steps))
        lines = docs.how_fast().splitlines()
        moe, dense, experts_line, loss = (
            next(line for line in lines if name in line)
            for name in ("Qwen3-30B-A3B width", "Qwen3-8B width", "moe_experts", "cross_entropy_loss")
        )
        assert experts_line == (
            f"| moe_experts, Qwen3-30B-A3B layer, T=16384, ms | **7.00** | - | {veomni} "
            f"| {'not measured'} | out of memory | 8.00 |"
        )
        assert moe.count("not measured") == 5
        cells = ("40,000, 34.5 GiB", "not measured", "out of memory", "-", "not measured", "50,000, loss 1.3% off")
        assert dense.endswith(f"| {' | '.join(cells)} |")
        assert loss.count("not measured") == 6


def test_cells_say_why_a_library_has_no_time(docs):
    errors = {
        "not supported": "ValueError: Unknown Modeling name: phi3. No Modeling registered for this source.",
        "timed out": "not done after 90 s",
        "out of memory": "torch.OutOfMemoryError: CUDA out of memory",
        "failed": "RuntimeError: shapes",
    }
    assert {docs._failure(error): error for error in errors.values()} == errors
