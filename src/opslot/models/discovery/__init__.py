"""Find the slots of an architecture in its upstream source."""

from opslot.models.discovery.engine import Finding, Port, patch_of, port

__all__ = ["Finding", "Port", "patch_of", "port"]
