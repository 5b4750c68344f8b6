"""Ops, kernels and slots: their specs, the registry, kernel selection, and binding."""

from opslot.slots.bind import bind, binding_of, bound_config, explain, unbind, write
from opslot.slots.binding import Binding, SlotBinding, Wrapper, resolve
from opslot.slots.config import OpsImplementationConfig, config_fields
from opslot.slots.op import Cost, InputCase, OpSpec, OpVariant
from opslot.slots.profile import Profile, Timing, profile_path, read_profile, write_profile
from opslot.slots.protocol import declared_slots, walk_slots
from opslot.slots.registry import KERNEL_REGISTRY, KernelRegistry, Resolution
from opslot.slots.report import BindingReport, BindingRow, SkippedRow, format_table
from opslot.slots.slot import BoundKernel, OpSlot
from opslot.slots.spec import HardwareRequirement, KernelRequest, KernelSpec, Requirement

__all__ = [
    "KERNEL_REGISTRY",
    "Binding",
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
    "SkippedRow",
    "SlotBinding",
    "Timing",
    "Wrapper",
    "bind",
    "binding_of",
    "bound_config",
    "config_fields",
    "declared_slots",
    "explain",
    "format_table",
    "profile_path",
    "read_profile",
    "resolve",
    "unbind",
    "walk_slots",
    "write",
    "write_profile",
]
