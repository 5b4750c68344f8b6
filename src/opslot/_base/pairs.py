"""Options of the form NAME=VALUE."""

from __future__ import annotations

from opslot._base.errors import ConfigError


def pairs(option: str, form: str, items: list[str]) -> dict[str, str]:
    """`items`, each of the form `form` such as "FIELD=VALUE", as a mapping; else ConfigError that names `option`."""
    found = {}
    for item in items:
        name, _, value = item.partition("=")
        if not name or not value:
            raise ConfigError(f"{option} {item!r} is not {form}", hint="give a name and a value, with = between them")
        found[name] = value
    return found
