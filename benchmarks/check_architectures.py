"""Run `opslot.verify.check_architecture` on the supported architectures, and write the outcome that docs/ shows.

    python benchmarks/check_architectures.py [--print-only] [ARCH ...]

Without names it checks every architecture that patchgen.lock lists for the installed Transformers (minutes); with names
it replaces the outcome of these. `python benchmarks/generate_docs.py` then writes the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opslot.models.discovery import discover
from opslot.patchgen.lock import Lock, lock_path
from opslot.verify import CHECKS, ArchitectureCheck, check_architecture
from opslot.verify.isolated import Processes

OUTCOMES = Path(__file__).resolve().parent / "architectures.json"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCH")
    parser.add_argument("--print-only", action="store_true", help="leave the outcome as it is")
    args = parser.parse_args()
    names = args.architectures
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    data = json.loads(OUTCOMES.read_text()) if names and OUTCOMES.exists() else {"architectures": {}}
    failed = 0
    with Processes(2) as processes:
        for arch in names or locked_architectures():
            found = check_architecture(language_model(arch), processes=processes)
            whole = with_images(arch)
            visual = found if whole is None else check_architecture(whole, processes=processes)
            data["architectures"][arch] = {
                "model_type": found.arch,
                "error": found.error,
                "skipped": sorted({skip.op for skip in discover(arch).skips}),
                "checks": checks_of(found),
                "samples": list(visual.samples),
                "missing": dict(visual.missing),
            }
            if visual is not found:
                data["architectures"][arch]["with_images"] = checks_of(visual)
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
    data |= {"transformers": transformers.__version__, "torch": torch.__version__, "checks": list(CHECKS)}
    data["architectures"] = dict(sorted(data["architectures"].items()))
    OUTCOMES.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    print(f"wrote {OUTCOMES}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
