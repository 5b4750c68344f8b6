"""Ops, kernels and slots: their specs, the registry, kernel selection, and binding."""

from opslot.slots.bind import bind, binding_of, bound_config, explain, unbind, write
from opslot.slots.binding import Binding, SlotBinding, Wrapper, resolve
from opslot.slots.config import OpsImplementationConfig, config_fields
from opslot.slots.op import Cost, InputCase, OpSpec, OpVariant
from opslot.slots.profile import Timing, read_profile, write_profile
from opslot.slots.protocol import walk_slots
from opslot.slots.registry import KERNEL_REGISTRY, KernelRegistry, Resolution
from opslot.slots.report import BindingReport, format_table
from opslot.slots.slot import BoundKernel, OpSlot
from opslot.slots.spec import HardwareRequirement, KernelRequest, KernelSpec, Requirement

__all__ = [
    "KERNEL_REGISTRY",
    "Binding",
    "BindingReport",
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
    "Requirement",
    "Resolution",
    "SlotBinding",
    "Timing",
    "Wrapper",
    "bind",
    "binding_of",
    "bound_config",
    "config_fields",
    "explain",
    "format_table",
    "read_profile",
    "resolve",
    "unbind",
    "walk_slots",
    "write",
    "write_profile",
]
