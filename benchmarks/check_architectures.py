"""Run `opslot.verify.check_architecture` on the supported architectures, and write the outcome that docs/ shows.

    python benchmarks/check_architectures.py [ARCH ...]

Without names it checks every architecture in patchgen.lock (minutes); with names it replaces the outcome of these.
`python benchmarks/generate_docs.py` then writes the table.
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
from opslot.models.discovery.supported import supported_architectures
from opslot.verify import CHECKS, ArchitectureCheck, check_architecture
from opslot.verify.isolated import Processes

OUTCOMES = Path(__file__).resolve().parent / "architectures.json"


def checks_of(found: ArchitectureCheck) -> dict[str, list[str]]:
    return {o.name: [o.result, o.detail if o.result != "passed" else ""] for o in found.outcomes}


def language_model(arch: str) -> str:
    """The model_type of an architecture's language model, without images or audio where there is one."""
    return f"{arch}_text" if f"{arch}_text" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else arch


def with_images(arch: str) -> str | None:
    """The model_type with images of an architecture whose language model was checked alone."""
    known = CONFIG_MAPPING_NAMES.get(arch) is not None and "vision_config" in CONFIG_MAPPING[arch].sub_configs
    return arch if known and language_model(arch) != arch else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCH")
    names = parser.parse_args().architectures
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    data = json.loads(OUTCOMES.read_text()) if names and OUTCOMES.exists() else {"architectures": {}}
    failed = 0
    with Processes(2) as processes:
        for arch in names or supported_architectures():
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
                print(f"{outcome:20} {'ok' if check.ok else 'FAILED'} {shown}", flush=True)
                for problem in check.problems:
                    print(f"    {problem.splitlines()[0]}", flush=True)
            failed += not (found.ok and visual.ok)
    data |= {"transformers": transformers.__version__, "torch": torch.__version__, "checks": list(CHECKS)}
    data["architectures"] = dict(sorted(data["architectures"].items()))
    OUTCOMES.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    print(f"wrote {OUTCOMES}; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
