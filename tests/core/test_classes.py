"""Shared subclasses: one per class, told apart by their mark."""

from __future__ import annotations

from diffaccel.core.classes import SharedSubclasses


class Animal:
    def says(self) -> str:
        return "?"


def test_one_subclass_for_all_objects_of_a_class() -> None:
    shared, asked = SharedSubclasses("_loud"), []

    def body(cls: type) -> dict[str, object]:
        asked.append(cls)
        return {"says": lambda self: cls.says(self).upper() + "!"}

    one, other = Animal(), Animal()
    for each in (one, other):
        object.__setattr__(each, "__class__", shared.of(type(each), body))
    assert type(one) is type(other) is not Animal and asked == [Animal]
    assert type(one).__name__ == "Animal" and type(one).__module__ == Animal.__module__
    assert isinstance(one, Animal) and one.says() == "?!" and Animal().says() == "?"
    assert shared.plain(type(one)) is Animal and shared.plain(Animal) is Animal


def test_subclasses_of_others_are_not_taken_for_ours() -> None:
    shared, others = SharedSubclasses("_ours"), SharedSubclasses("_theirs")
    theirs = others.of(Animal, lambda cls: {})
    assert shared.plain(theirs) is theirs and others.plain(theirs) is Animal
    assert shared.plain(shared.of(theirs, lambda cls: {})) is theirs
