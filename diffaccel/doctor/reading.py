"""What tokenizers are given in a run, and whether they cut it: tokenizers say so to nobody."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

READS = "_diffaccel_reads"  # instance attribute of a tokenizer that is being watched


_CLASSES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Read:
    """One text that a tokenizer took: how many tokens it has, and how many the model gets at most."""

    tokenizer: str
    text: str
    tokens: int
    limit: int

    @property
    def cut(self) -> bool:
        """Is the end of it lost?"""
        return self.tokens > self.limit


def _watched(cls: Any) -> Any:
    """The subclass of a tokenizer's class that notes its calls (one per class, of the same name)."""

    if cls in _CLASSES:
        return _CLASSES[cls]
    plain = cls.__call__

    def call(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = plain(self, *(() if text is None else (text,)), *args, **kwargs)
        name, reads = vars(self)[READS]
        limit = kwargs.get("max_length") or getattr(self, "model_max_length", None)
        if kwargs.get("truncation") in (True, "longest_first") and isinstance(limit, int) and text is not None:
            texts = [text] if isinstance(text, str) else list(text)
            whole = plain(self, texts, truncation=False, padding=False)["input_ids"]
            reads += [Read(name, one, len(ids), limit) for one, ids in zip(texts, whole, strict=True)]
        return given

    made = _CLASSES[cls] = type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    return made


@contextlib.contextmanager
def reading(pipe: Any) -> Iterator[list[Read]]:
    """Note what the pipeline's tokenizers are given; they are afterwards as before."""
    reads: list[Read] = []
    with contextlib.ExitStack() as stack:
        for name, part in pipe.components.items():
            if hasattr(part, "model_max_length") and callable(part) and READS not in vars(part):
                stack.callback(_unwatch, part, type(part))
                vars(part)[READS] = (name, reads)
                part.__class__ = _watched(type(part))
        yield reads


def _unwatch(tokenizer: Any, cls: type) -> None:
    tokenizer.__class__ = cls
    vars(tokenizer).pop(READS, None)


def cut_prompts(reads: list[Read], prompts: list[str]) -> tuple[list[Read], list[Read]]:
    """(a read of every prompt that all its tokenizers cut, one of every prompt that some cut and others took whole).

    Tokenizers are given the prompt in a template, or tidied; whose text it is is told by its first letters.
    """
    lost, partly = list[Read](), list[Read]()
    for prompt in prompts:
        start = _tidy(prompt)[:40]
        mine = [read for read in reads if start and start in _tidy(read.text)]
        cut = [read for read in mine if read.cut]
        if cut:
            (lost if len(cut) == len(mine) else partly).append(max(cut, key=lambda read: read.limit))
    return lost, partly


def _tidy(text: str) -> str:
    return " ".join(text.lower().split())
