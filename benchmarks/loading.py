"""Loading a sharded per-expert MoE checkpoint: opslot beside Transformers' from_pretrained.

    python benchmarks/loading.py --size-gb 4 --shards 4 [--output FILE]

Every load runs in a process of its own, the loaders alternating; imports are not timed, building the model is. "cold"
drops the files from the page cache first (posix_fadvise, which does not empty the disk's or the host's own cache);
"read the files" is the time of reading them front to back into one small buffer. Times are of the best runs,
since other load on the machine only adds time. Peak memory is the process's high-water mark, mapped file pages
included, less what it was after the imports.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXPERTS, HIDDEN, INTERMEDIATE, VOCAB = 128, 2048, 768, 32768
LAYER_BYTES = 2 * EXPERTS * 3 * HIDDEN * INTERMEDIATE


def make_config(size_gb: float) -> Any:
    """Qwen3-30B-A3B's widths with as many layers as make about `size_gb` in bf16."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=max(1, round((size_gb * 1e9 - 4 * VOCAB * HIDDEN) / LAYER_BYTES)),
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def write_checkpoint(folder: Path, size_gb: float, shards: int) -> None:
    """A checkpoint of random values in the hub's per-expert layout."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    from opslot.checkpoint import save_weights

    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(make_config(size_gb), dtype=torch.bfloat16)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        values = torch.randint(0x3C00, 0x3E00, (1 << 20,), dtype=torch.int16, generator=generator).view(torch.bfloat16)
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), len(values)):
            flat[start : start + len(values)] = values[: flat.numel() - start]
    save_weights(model, folder, layout="per_expert", max_shard_size=-(-nbytes // shards) + (8 << 20))


def status_bytes(field: str) -> int:
    """A memory field of this process, e.g. VmHWM for the peak resident set."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def load_once(loader: str, folder: Path) -> dict[str, float]:
    """Load in this process: wall and CPU seconds, peak bytes above the imports', and a checksum of the weights."""
    import torch
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    from opslot.checkpoint import load_weights

    config = AutoConfig.from_pretrained(folder)
    gc.collect()
    before = status_bytes("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    if loader == "opslot":
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
        load_weights(model, folder)
    else:
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = status_bytes("VmHWM") - before
    checksum = sum(float(p.detach().view(torch.int16).sum()) for p in model.parameters())
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak, "checksum": checksum}


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_files(folder: Path) -> float:
    """Seconds to read the weights once without keeping them."""
    buffer = bytearray(8 << 20)
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - start


def measure(folder: Path, repeats: int) -> list[Any]:
    """The best runs of each loader, cold and warm, as values."""
    from opslot.bench.result import Value

    shards = [file.stat().st_size / 1e9 for file in folder.glob("*.safetensors")]
    budget = sum(shards) + max(shards)
    values = [Value("checkpoint", sum(shards), "GB"), Value("its largest shard", max(shards), "GB")]
    checksums = set()
    for cache in ("cold", "warm"):
        runs: dict[str, list[dict[str, float]]] = {"opslot": [], "transformers": []}
        reads: list[float] = []
        for repeat in range(repeats):
            if cache == "cold":
                drop_from_page_cache(folder)
            reads.append(read_files(folder))
            # The order alternates, so that other load on the machine affects both.
            for loader in sorted(runs, reverse=repeat % 2 == 1):
                if cache == "cold":
                    drop_from_page_cache(folder)
                command = [sys.executable, __file__, "--one", loader, "--folder", str(folder)]
                answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs[loader].append(json.loads(answer.splitlines()[-1]))
                checksums.add(runs[loader][-1]["checksum"])
                print(f"{cache:5} {loader:13} {runs[loader][-1]['seconds']:6.2f} s", file=sys.stderr)
        best = {name: min(run["seconds"] for run in each) for name, each in runs.items()}
        peak = {name: max(run["peak_bytes"] for run in each) / 1e9 for name, each in runs.items()}
        values += [
            Value(f"{cache}: read the files", min(reads), "s"),
            *(Value(f"{cache}: load with {name}", seconds, "s") for name, seconds in best.items()),
            Value(f"{cache}: time of opslot / transformers", best["opslot"] / best["transformers"], "x", "<= 0.7"),
            Value(f"{cache}: peak memory of opslot", peak["opslot"], "GB", f"<= {budget:.3f}"),
            Value(f"{cache}: peak memory of transformers", peak["transformers"], "GB"),
        ]
    if len(checksums) != 1:
        raise SystemExit("the loaders gave different weights; no time is reported")
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=4.0, help="size of the checkpoint in bf16 (default 4)")
    parser.add_argument("--shards", type=int, default=4, help="number of files (default 4)")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each kind (default 3)")
    parser.add_argument(
        "--folder", type=Path, help="where to put the checkpoint, reused when there (default: temporary)"
    )
    parser.add_argument("--output", help="write the result as JSON")
    parser.add_argument("--one", choices=("opslot", "transformers"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(load_once(args.one, args.folder)))
        return 0
    from opslot.bench.files import OutputFiles
    from opslot.bench.result import Environment, Result, Run

    files = OutputFiles(args.output)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "checkpoint"
        if not folder.exists():
            write_checkpoint(folder, args.size_gb, args.shards)
        values = measure(folder, args.repeats)
    for v in values:
        print(f"{v.name:40} {v.value:8.3f} {v.unit:3} {v.goal}")
    command = f"python benchmarks/loading.py --size-gb {args.size_gb:g} --shards {args.shards} --repeats {args.repeats}"
    files.write(Result("benchmarks/loading.py", [Run(command, Environment.current("cpu"), values=values)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
