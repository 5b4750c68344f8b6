"""Run `opslot.verify.check_architecture` on the supported architectures, and write the outcome that docs/ shows.

    python benchmarks/check_architectures.py [--print-only] [--checks NAMES] [ARCH ...]
    python benchmarks/check_architectures.py --device cuda --dtype bfloat16 --workers 15 [ARCH ...]

Without names it checks every architecture that patchgen.lock lists for the installed Transformers (minutes); with names
it replaces the outcome of these, and with --checks that of these checks. With TRITON_INTERPRET=1 the check "compiled"
takes the kernels that a GPU has. `python benchmarks/generate_docs.py` then writes the table. On another device or in
another dtype the checks are "auto", "packed" and "compiled", and their outcome is a file of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opslot.models.discovery import discover
from opslot.patchgen.lock import Lock, lock_path
from opslot.verify import CHECKS, ArchitectureCheck, check_architecture
from opslot.verify.isolated import Processes

OUTCOMES = Path(__file__).resolve().parent / "architectures.json"
# The outcome on another device or in another dtype.
ELSEWHERE = "architectures_{device}_{dtype}.json"


def checks_of(found: ArchitectureCheck) -> dict[str, list[str]]:
    return {o.name: [o.result, o.detail if o.result != "passed" else ""] for o in found.outcomes}


def locked_architectures() -> list[str]:
    """The architectures that the lock lists for the installed Transformers."""
    lock = Lock.load(lock_path())
    return sorted(arch for arch, releases in lock.archs.items() if transformers.__version__ in releases)


def language_model(arch: str) -> str:
    """The model_type of an architecture's language model, without images or audio where there is one."""
    return f"{arch}_text" if f"{arch}_text" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else arch


def with_images(arch: str) -> str | None:
    """The model_type with images of an architecture whose language model was checked alone."""
    known = CONFIG_MAPPING_NAMES.get(arch) is not None and "vision_config" in CONFIG_MAPPING[arch].sub_configs
    return arch if known and language_model(arch) != arch else None


def lacks_package(check: ArchitectureCheck) -> bool:
    """Whether the model cannot be built for want of a package, such as timm."""
    return check.error.startswith("raised ImportError")


def check(arch: str, device: str, dtype: str) -> ArchitectureCheck:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    return check_architecture(arch, device=device, dtype=dtype)


def check_elsewhere(names: list[str], device: str, dtype: str, workers: int) -> tuple[int, dict[str, Any]]:
    """Check architectures on a device and in a dtype, each of `workers` processes its own; failures and outcomes."""
    whole = [name for arch in names for name in (language_model(arch), with_images(arch)) if name is not None]
    failed, outcomes = 0, {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        names_of = {pool.submit(check, arch, device, dtype): arch for arch in dict.fromkeys(whole)}
        for future in as_completed(names_of):
            arch = names_of[future]
            try:
                found = future.result()
            except Exception as error:
                # After an assertion on a device, all that uses it raises in that process.
                found = ArchitectureCheck(arch, error=f"raised {type(error).__name__}: {error}")
            failed += not found.ok and not lacks_package(found)
            outcome = {"error": found.error, "checks": checks_of(found), "samples": list(found.samples)}
            outcomes[arch] = outcome | versions()
            shown = " ".join(f"{o.name}={o.result}" for o in found.outcomes)
            print(f"{arch:20} {shown or 'not checked'} {', '.join(found.samples)}", flush=True)
            for problem in found.problems:
                print(f"    {' '.join(problem.split())[:600]}", flush=True)
    print(f"transformers {transformers.__version__}, {dtype} on {device}: {failed} failed")
    return failed, outcomes


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def write(path: Path, data: dict[str, Any]) -> None:
    data["architectures"] = dict(sorted(data["architectures"].items()))
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCH")
    parser.add_argument("--print-only", action="store_true", help="leave the outcome as it is")
    parser.add_argument("--checks", help="only these (separated by commas), on a CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workers", type=int, default=1, help="processes, on another device or in another dtype")
    args = parser.parse_args()
    names = args.architectures
    if (args.device, args.dtype) != ("cpu", "float32"):
        failed, outcomes = check_elsewhere(names or locked_architectures(), args.device, args.dtype, args.workers)
        if not args.print_only:
            path = OUTCOMES.with_name(ELSEWHERE.format(device=args.device, dtype=args.dtype))
            data = json.loads(path.read_text()) if names and path.exists() else {"architectures": {}}
            data["architectures"] |= outcomes
            name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
            write(path, data | {"device": name, "dtype": args.dtype})
        return 1 if failed else 0
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    checks = args.checks.split(",") if args.checks else None
    data = json.loads(OUTCOMES.read_text()) if (names or checks) and OUTCOMES.exists() else {"architectures": {}}
    failed = 0
    with Processes(2) as processes:
        for arch in names or locked_architectures():
            found = check_architecture(language_model(arch), checks=checks, processes=processes)
            whole = with_images(arch)
            visual = found if whole is None else check_architecture(whole, checks=checks, processes=processes)
            earlier = data["architectures"].get(arch, {}) if checks else {}
            data["architectures"][arch] = {
                "model_type": found.arch,
                "error": found.error,
                "skipped": sorted({skip.op for skip in discover(arch).skips}),
                "checks": earlier.get("checks", {}) | checks_of(found),
                "samples": list(visual.samples),
                "missing": dict(visual.missing),
            }
            if visual is not found:
                data["architectures"][arch]["with_images"] = earlier.get("with_images", {}) | checks_of(visual)
            for outcome in dict.fromkeys([found.arch, visual.arch]):
                check = found if outcome == found.arch else visual
                shown = " ".join(f"{o.name}={o.result}" for o in check.outcomes)
                failed += not check.ok and not lacks_package(check)
                result = "ok" if check.ok else "not checked" if lacks_package(check) else "FAILED"
                print(f"{outcome:20} {result} {shown}", flush=True)
                for problem in check.problems:
                    print(f"    {' '.join(problem.split())[:300]}", flush=True)
    print(f"transformers {transformers.__version__}: {failed} failed")
    if args.print_only:
        return 1 if failed else 0
    write(OUTCOMES, data | versions() | {"checks": list(CHECKS)})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
