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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opslot.models.discovery import discover
from opslot.models.discovery.supported import supported_architectures
from opslot.verify import CHECKS, check_architecture
from opslot.verify.isolated import Processes

OUTCOMES = Path(__file__).resolve().parent / "architectures.json"


def language_model(arch: str) -> str:
    """The model_type of an architecture's language model, without images or audio where there is one."""
    return f"{arch}_text" if f"{arch}_text" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else arch


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
            data["architectures"][arch] = {
                "model_type": found.arch,
                "error": found.error,
                "skipped": sorted({skip.op for skip in discover(arch).skips}),
                "checks": {o.name: [o.result, o.detail if o.result != "passed" else ""] for o in found.outcomes},
            }
            shown = " ".join(f"{o.name}={o.result}" for o in found.outcomes)
            print(f"{arch:20} {'ok' if found.ok else 'FAILED'} {shown}", flush=True)
            for problem in found.problems:
                print(f"    {problem.splitlines()[0]}", flush=True)
            failed += not found.ok
    data |= {"transformers": transformers.__version__, "torch": torch.__version__, "checks": list(CHECKS)}
    data["architectures"] = dict(sorted(data["architectures"].items()))
    OUTCOMES.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    print(f"wrote {OUTCOMES}; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
