"""Check what each model type with images, video or audio does, and write the outcome that docs/multimodal.md shows.

    python benchmarks/check_media.py [--print-only] [MODEL_TYPE ...]

Without names it checks every type that Transformers has for text from images or audio (minutes); with names it replaces
the outcome of these. `python benchmarks/generate_docs.py` then writes the table. With `--print-only` the exit status is
1 where a check of a supported architecture failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from opslot.models._build import multimodal_auto_class  # noqa: E402
from opslot.patchgen.lock import Lock, lock_path  # noqa: E402
from opslot.verify import ArchitectureCheck, check_architecture  # noqa: E402
from tests.trainer import test_processors  # noqa: E402

OUTCOMES = Path(__file__).resolve().parent / "media.json"
_LONGEST = 160
CHECKS = ("eager", "auto", "packed", "frozen")


def model_types() -> list[str]:
    # The class has what is read; some have no default config. Evolla's has two names.
    classes = {CONFIG_MAPPING[name]: name for name in sorted(CONFIG_MAPPING_NAMES)}
    return sorted(name for cls, name in classes.items() if multimodal_auto_class(cls) is not None)


def trained(name: str) -> str:
    """How the tests train a type with its own processor; "" where they do not."""
    if name in test_processors.UNPACKED:
        return "unpacked"
    return "packed" if name in (*test_processors.QUICK, *test_processors.SLOW) else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--print-only", action="store_true", help="leave the outcome as it is")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    supported = Lock.load(lock_path()).archs
    types = json.loads(OUTCOMES.read_text())["types"] if args.types else {}
    failed = 0
    for name in args.types or model_types():
        try:
            found = check_architecture(name, checks=CHECKS)
        except Exception as error:
            # A model that is not a language model at all, such as one of robot actions.
            found = ArchitectureCheck(name, error=f"raised {type(error).__name__}: {error}")
        types[name] = {
            "error": " ".join(found.error.split())[:_LONGEST],
            "checks": {o.name: [o.result, (o.detail.splitlines() or [""])[0]] for o in found.outcomes},
            "samples": list(found.samples),
            "missing": dict(found.missing),
            "processor": trained(name),
        }
        wrong = [o.name for o in found.outcomes if o.result == "failed"]
        failed += bool(wrong) and name in supported
        shown = found.error or " ".join(f"{o.name}={o.result}" for o in found.outcomes)
        kinds = ", ".join(found.samples)
        print(name, "FAILED" if wrong else "not checked" if found.error else "ok", shown, kinds, flush=True)
        if not args.print_only:
            OUTCOMES.write_text(
                json.dumps({"transformers": transformers.__version__, "types": types}, indent=1, sort_keys=True) + "\n"
            )
    print(f"transformers {transformers.__version__}: {failed} supported architectures failed")
    return 1 if failed and args.print_only else 0


if __name__ == "__main__":
    sys.exit(main())
