"""From a preset to the wishes for one pipeline on one machine: "auto" by family and device, `on` by device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...errors import InvalidOptionError
from ...ledger.hardware import HARDWARE, Hardware
from ..levers import PLACES
from . import Preset, known, load, made_for

AUTO = "auto"
VARIANTS = frozenset({"ti", "super", "laptop", "mobile", "max-q", "d"})  # other chips under the same number


def machine(hardware: Hardware) -> str | None:
    """The short name of a machine ("4090" for "NVIDIA GeForce RTX 4090"); None where presets know none such."""
    words = hardware.name.lower().replace("_", " ").split()
    if VARIANTS & set(words):
        return None
    return next((word for word in words if word in HARDWARE), None)


def elsewhere(planned: Hardware, here: Hardware) -> str | None:
    """A sentence for a plan that is put into effect on another machine than it was made for; None on the same one."""
    if planned == here or (machine(planned) is not None and machine(planned) == machine(here)):
        return None
    return (
        f"planned for {planned}, but this is {here}: what that machine is good at may be slow here, or fail (leave "
        "hardware= out to plan for this one)"
    )


def fit(preset: Preset, asked: object, family: str, hardware: Hardware, overrides: Collection[str] = ()) -> Preset:
    """The preset for this family and machine.

    `asked` is what the user named, `overrides` the keys the user sets anyway. For "auto", a preset
    `{machine}-{family}`, one that names both, or one for cards of that memory takes the place of the general one where
    there is one (the plan then says "auto (4090-flux)"); a broken one of a third party is passed over with a note.
    """
    if asked == AUTO:
        preset = _specific(preset, family, hardware)
    elif preset.hardware is not None and preset.hardware != machine(hardware):
        preset = replace(preset, notes=(*preset.notes, f"made for {preset.hardware}, but this is {hardware.name}"))
    return _on(preset, hardware.kind, overrides)


def _specific(general: Preset, family: str, hardware: Hardware) -> Preset:
    name = f"{machine(hardware)}-{family}"
    if not known(name):
        memory = hardware.memory_gib if hardware.may.own_memory else None
        found = made_for(family, machine(hardware), memory)
        return general if found is None else replace(found, name=f"{AUTO} ({found.name})")
    try:
        special = load(name)
    except InvalidOptionError as error:
        return replace(general, notes=(*general.notes, str(error)))
    if special.families is not None and family not in special.families:
        return general
    return replace(special, name=f"{AUTO} ({name})")


def _on(preset: Preset, kind: str, overrides: Collection[str]) -> Preset:
    table = preset.on.get(kind, {})
    changes = {k: v for k, v in table.get("wishes", {}).items() if k not in overrides and preset.wishes.get(k) != v}
    if not changes:
        return preset
    wishes = {**preset.wishes, **changes}
    for key, value in changes.items():
        place = PLACES.get(key)
        if place is not None and place.prefix and not value:  # switched off: its numbers go with it
            wishes = {k: v for k, v in wishes.items() if not place.owns(k)}
    changed = ", ".join(f"{key}={value!r}" for key, value in changes.items())
    note = f"on a {kind}: {changed}" + (f" ({table['why']})" if table.get("why") else "")
    return replace(preset, wishes=wishes, notes=(*preset.notes, note))
