"""Every variant of every op is in some architecture of a supported release."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import opslot.ops
from opslot._base.device import CPU
from opslot.models.discovery import discover
from opslot.ops._common.model_config import layer_config
from opslot.patchgen.lock import Lock, lock_path
from opslot.slots import KERNEL_REGISTRY, KernelRequest
from opslot.slots.protocol import walk_slots
from opslot.verify.random_model import class_of
from opslot.verify.tiny import tiny_config

# The loss reaches token_log_probs with `return_log_probs=True`: tests/models/test_log_probs.py.
_WITHOUT_SLOT = {"cross_entropy_loss/token_log_probs"}


def test_every_variant_is_matched_in_some_architecture():
    ops = Path(str(opslot.ops.__file__)).parent
    folders = [file.parent.name for file in ops.glob("*/forms.py")]
    missing = {f"{name}/{variant}" for name in folders for variant in KERNEL_REGISTRY.op(name).variants}
    locked = Lock.load(lock_path()).slots
    for releases in locked.values():
        for slots in releases.values():
            missing -= {slot.split(" ")[1] for slot in slots}
    # Architectures that a form names are probably those with the variants that are missing.
    forms = "".join(file.read_text() for file in ops.glob("*/*forms.py"))
    others = [file.parent.name for file in (Path(str(transformers.__file__)).parent / "models").glob("*/modeling_*.py")]
    for name in sorted({*others} - locked.keys(), key=lambda name: (f'"{name}"' not in forms, name)):
        if missing - _WITHOUT_SLOT:
            missing -= {str(match) for match in discover(name).matches}
    assert missing <= _WITHOUT_SLOT


def test_static_shapes_of_layers_that_differ():
    """Gemma 4 has wider heads in layers without a window, in a config that raises where it is asked for one width."""
    config = tiny_config("gemma4")
    if not getattr(config.get_text_config(), "is_heterogeneous", False):
        pytest.skip("layers of this release share a config")
    model = class_of(config)._from_config(config)
    opslot.apply(model, "eager")
    widths = set()
    for _, module, _, op_name, variant in walk_slots(model.model.language_model):
        request = KernelRequest(op_name, variant, CPU, torch.float32, module, config)
        shape = KERNEL_REGISTRY.op(op_name).variant(variant).static_shape
        sizes = shape(request) if shape is not None else None
        widths |= {sizes["head_dim"]} if op_name == "rotary_pos_emb" and sizes else set()
    assert widths == {layer.self_attn.head_dim for layer in model.model.language_model.layers}
    assert len(widths) == 2


def test_layers_of_an_encoder_beyond_those_of_the_language_model():
    config = tiny_config("gemma4").get_text_config()
    assert layer_config(config, config.num_hidden_layers) is config
