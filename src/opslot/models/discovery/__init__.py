"""Discovery of the slots of an architecture in Transformers' source."""

from opslot.models.discovery.collected_forms import register_forms
from opslot.models.discovery.engine import Discovery, discover
from opslot.models.discovery.finder import architectures, digest, find_patch
from opslot.patchgen.forms import Match, Skip

__all__ = [
    "Discovery",
    "Match",
    "Skip",
    "architectures",
    "digest",
    "discover",
    "find_patch",
    "register_forms",
]
