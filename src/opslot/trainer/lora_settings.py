"""Checks of the settings of LoRA; imports nothing heavy unless they need it."""

from __future__ import annotations

import math
import re

from packaging.version import Version

from opslot._base.device import has_package, package_version
from opslot._base.launcher import launched_world_size
from opslot.checkpoint.adapters import FROM_WEIGHTS
from opslot.trainer.config import LoraConfig, RunConfig
from opslot.trainer.train_settings import is_sharded

# A larger rank is taken for a mistake.
_LARGEST_RANK = 2**16
# As in pyproject.toml. Earlier ones cannot be imported beside Transformers 5, have no conversion of target modules, or
# read no adapters with Transformers 5.9.
_OLDEST_PEFT = "0.20"


def check_lora(config: RunConfig, problems: list[str]) -> None:
    """Settings of adapters that cannot work."""
    lora = config.lora
    if lora.r is None:
        changed = [name for name, value in vars(lora).items() if value != getattr(LoraConfig, name)]
        problems += [
            f"lora.{name} needs lora.r, the rank of the adapters; set it, or remove lora.{name}" for name in changed
        ]
        return
    if lora.r < 1:
        problems.append(f"lora.r={lora.r} must be at least 1")
    ranks = {"lora.r": lora.r} | {f"lora.rank_pattern.{name}": rank for name, rank in (lora.rank_pattern or {}).items()}
    problems += [
        f"{name}={rank} must be at most {_LARGEST_RANK}" for name, rank in ranks.items() if rank > _LARGEST_RANK
    ]
    alphas = {} if lora.alpha is None else {"lora.alpha": lora.alpha}
    alphas |= {f"lora.alpha_pattern.{name}": alpha for name, alpha in (lora.alpha_pattern or {}).items()}
    problems += [
        f"{name}={alpha} must be above 0 and finite" for name, alpha in alphas.items() if not 0 < alpha < math.inf
    ]
    if not 0 <= lora.dropout < 1:
        problems.append(f"lora.dropout={lora.dropout} must be in [0, 1)")
    problems += [
        f"lora.rank_pattern: {name} has rank {rank}, which must be at least 1"
        for name, rank in (lora.rank_pattern or {}).items()
        if rank < 1
    ]
    for field, names in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        problems += [
            f"lora.{field}: {name} is not a valid regular expression; escape special characters"
            for name in names or ()
            if not _is_regex(name)
        ]
    problems += _unsupported_adapters(lora, launched_world_size() > 1 or is_sharded(config.train))
    if lora.experts and lora.dropout:
        problems.append("lora.experts adds to the weights, which have no dropout; set lora.dropout: 0")
    if not lora.target_modules:
        problems.append("lora.target_modules is empty; name modules such as q_proj, or set it to all-linear")
    if not config.model.model_path:
        problems.append("lora needs model.model_path, the checkpoint whose weights the adapters are added to; set it")
    if lora.quantization is not None:
        from opslot.models._adapters.nf4 import nf4_problem

        problem = nf4_problem(config.train.fsdp.cpu_offload)
        if problem:
            problems.append(f"lora.quantization: {problem}")
        if lora.merge:
            problems.append("lora.merge needs unquantized weights; remove it, and run opslot merge after the training")
    problems += _peft_problems()


def _peft_problems() -> list[str]:
    if not has_package("peft"):
        return ["lora needs the peft package; pip install peft"]
    version = package_version("peft")
    if version is not None and Version(version) < Version(_OLDEST_PEFT):
        return [f"lora needs peft {_OLDEST_PEFT} or later, and {version} is installed; pip install --upgrade peft"]
    return []


def _unsupported_adapters(lora: LoraConfig, sharded: bool) -> list[str]:
    kinds = {"lora.experts": lora.experts, "lora.quantization": lora.quantization is not None}
    found = [
        f"lora.use_dora cannot be combined with {name}; remove one of them"
        for name, given in kinds.items()
        if lora.use_dora and given
    ]
    if lora.init in FROM_WEIGHTS:
        kinds |= {"lora.use_dora": lora.use_dora, "several processes or train.fsdp": sharded}
        found += [
            f"lora.init={lora.init} changes the base weights, which cannot be combined with {name}; use kaiming"
            for name, given in kinds.items()
            if given
        ]
    return found


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True
