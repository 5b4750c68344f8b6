"""What a kernel is, who may use it where, and the slots it is bound to."""

from opslot.slots.bind import bind, bound_config, explain, own_config, unbind
from opslot.slots.config import OpsImplementationConfig, config_fields
from opslot.slots.op import Cost, InputCase, OpSpec, OpVariant
from opslot.slots.profile import Profile, Timing, profile_path, read_profile, write_profile
from opslot.slots.registry import KERNEL_REGISTRY, KernelRegistry, Resolution
from opslot.slots.report import BindingReport, BindingRow, format_table
from opslot.slots.slot import BoundKernel, OpSlot, declared_slots, loss_only, walk_slots
from opslot.slots.spec import HardwareRequirement, KernelRequest, KernelSpec, Requirement

__all__ = [
    "KERNEL_REGISTRY",
    "BindingReport",
    "BindingRow",
    "BoundKernel",
    "Cost",
    "HardwareRequirement",
    "InputCase",
    "KernelRegistry",
    "KernelRequest",
    "KernelSpec",
    "OpSlot",
    "OpSpec",
    "OpVariant",
    "OpsImplementationConfig",
    "Profile",
    "Requirement",
    "Resolution",
    "Timing",
    "bind",
    "bound_config",
    "config_fields",
    "declared_slots",
    "explain",
    "format_table",
    "loss_only",
    "own_config",
    "profile_path",
    "read_profile",
    "unbind",
    "walk_slots",
    "write_profile",
]
