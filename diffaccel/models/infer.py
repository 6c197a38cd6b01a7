"""The ModelSpec of an unknown denoiser, worked out from a recorded trace; or a refusal that says what was seen.

    with record(pipe.transformer) as trace:
        pipe(...)  # at least two calls of the denoiser
    found = infer(trace)

A stack is a run of block lists in which every block's results are the next block's streams, told by the identity
of tensors, not by their names. A list may also start with the concatenation of what the list before returned.
Whatever else touches a result in the middle of the stack rules the list out: a cache that skips blocks would hand
the wrong thing to it. Where that happens to the longest list, the model is refused. The last block's results that
are used afterwards are the streams to keep. Every recorded call must tell the same story. What tensors cannot tell
(form of guidance, decoder, token order) stays at its default.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .spec import BlockList, ModelSpec
from .trace import BlockCall, Event, Join, ListInfo, Touch, Trace, Value, record

__all__ = ["Refusal", "infer", "record"]

# Arguments that diffusers' denoisers use to act on blocks from outside.
_FROM_OUTSIDE = re.compile(r"controlnet\w*_(samples|hidden_states)$|^skip_layers$|^kv_cache")


@dataclass(frozen=True)
class Refusal:
    """Why no spec could be worked out, and what was seen."""

    reason: str
    seen: str

    def __str__(self) -> str:
        return f"{self.reason}. Seen: {self.seen}"


class _Unclear(Exception):
    """Something in a trace that does not add up to a stack."""


@dataclass(frozen=True)
class _Streams:
    """A list of blocks that hand their results on: the stream that each result is."""

    info: ListInfo
    blocks: tuple[BlockCall, ...]
    roles: tuple[str, ...]

    def last(self) -> dict[str, Value]:
        """What the last block returned, by stream (without those that it does not return)."""
        found = zip(self.roles, self.blocks[-1].returned, strict=True)
        return {name: value for name, value in found if value is not None}


@dataclass(frozen=True)
class _Story:
    """What one call tells."""

    stack: tuple[BlockList, ...]
    reads: tuple[str, ...]


def infer(trace: Trace, component: str = "transformer") -> ModelSpec | Refusal:
    """The spec of the recorded denoiser, to be found at `component` of its pipeline."""
    try:
        if trace.note:
            raise _Unclear(trace.note)
        if len(trace.calls) < 2:
            raise _Unclear(f"{len(trace.calls)} call(s) were recorded, and the second is needed to verify the first")
        stories = [_story(trace, events) for events in trace.calls]
        for number, story in enumerate(stories[1:], 2):
            if story != stories[0]:
                raise _Unclear(f"call {number} ran other blocks, or in other roles, than the first")
    except _Unclear as why:
        return Refusal(f"{trace.model} has no stack of blocks that can be told: {why}", _seen(trace))
    [story] = set(stories)
    stream = story.reads[0]
    return ModelSpec(
        family=f"inferred from {trace.model}",
        denoisers=(component,),
        classes=(trace.model,),
        stack=story.stack,
        stream=stream,
        reads=() if story.reads == (stream,) else story.reads,
        stand_down=tuple(name for name in trace.parameters if _FROM_OUTSIDE.search(name)),
    )


def _seen(trace: Trace) -> str:
    """The lists, and in which order their blocks ran in the first call."""
    lists = ", ".join(f"{row.attribute} ({row.count} x {row.block})" for row in trace.lists)
    if not trace.calls:
        return lists or "no list of like blocks"
    runs = itertools.groupby(_blocks(trace.calls[0]), lambda call: call.attribute)
    order = "; ".join(f"{name} {', '.join(str(call.index) for call in calls)}" for name, calls in runs)
    return f"{lists or 'no list of like blocks'}; order of the first call: {order or 'none of them ran'}"


def _blocks(events: Sequence[Event]) -> list[BlockCall]:
    return [event for event in events if isinstance(event, BlockCall)]


# ---- one call ----------------------------------------------------------------------------------------


def _story(trace: Trace, events: Sequence[Event]) -> _Story:
    """The longest chain of lists that hand their streams on."""
    infos = {row.attribute: row for row in trace.lists}
    chains: list[list[tuple[_Streams, tuple[str, ...]]]] = []  # lists with what each joins
    unclear: dict[str, int] = {}  # why a list is none, with its number of blocks
    grouped = [(name, tuple(calls)) for name, calls in itertools.groupby(_blocks(events), lambda c: c.attribute)]
    for name, calls in grouped:
        try:
            streams = _streams(infos[name], calls, events)
        except _Unclear as why:
            unclear[str(why)] = infos[name].count
            chains.append([])
            continue
        joins = _joins(chains[-1][-1][0], streams, events) if chains and chains[-1] else None
        if joins is None:
            chains.append([(streams, ())])
        elif any(joined for _, joined in chains[-1]):  # joined streams are the chain's last list only
            chains[-1] = [(chains[-1][-1][0], ()), (streams, joins)]
        else:
            chains[-1].append((streams, joins))
    best = max(reversed(chains), key=_length, default=[])
    if _length(best) < 2 or _length(best) <= max(unclear.values(), default=0):  # some refiners are not the model
        raise _Unclear("; ".join(unclear) or "no list of at least two like blocks ran")
    return _told(best, events)


def _length(chain: list[tuple[_Streams, tuple[str, ...]]]) -> int:
    return sum(len(streams.blocks) for streams, _ in chain)


def _told(chain: list[tuple[_Streams, tuple[str, ...]]], events: Sequence[Event]) -> _Story:
    first, last = chain[0][0], chain[-1][0]
    used = _used(last.blocks[-1], events)
    reads = tuple(name for name in first.info.parameters if name in last.last() and last.last()[name].key in used)
    if not reads:
        raise _Unclear(f"nothing that the last block of {last.info.attribute} returns is used afterwards")
    if not set(reads) <= set(first.roles):
        raise _Unclear(f"the first block of {first.info.attribute} does not return {', '.join(reads)}")
    names = {streams.info.attribute for streams, _ in chain}
    skipped = {value.key for streams, _ in chain for call in streams.blocks for value in call.returned if value}
    skipped -= {value.key for value in last.last().values()}
    for call in _blocks(events):
        if call.attribute not in names and skipped & {value.key for value in call.given.values()}:
            raise _Unclear(f"{call.attribute} {call.index} is given what a block in the middle of the stack returned")
    return _Story(tuple(_row(streams, joins) for streams, joins in chain), reads)


def _row(streams: _Streams, joins: tuple[str, ...]) -> BlockList:
    names = streams.info.parameters
    count = max(names.index(role) for role in streams.roles) + 1
    return BlockList(streams.info.attribute, names[:count], streams.roles, joins)


# ---- one list ----------------------------------------------------------------------------------------


def _streams(info: ListInfo, calls: tuple[BlockCall, ...], events: Sequence[Event]) -> _Streams:
    """The list with the role of each result; unclear unless its blocks ran in order and hand everything on."""
    order = [call.index for call in calls]
    if order != list(range(info.count)):
        raise _Unclear(f"blocks of {info.attribute} ran in the order {', '.join(map(str, order))}")
    odd = next((call.form for call in calls if call.form not in ("tensor", "tuple")), None)
    if odd is not None or len({(call.form, len(call.returned)) for call in calls}) > 1:
        raise _Unclear(f"blocks of {info.attribute} return {odd or 'now this, now that'}")
    if info.count < 2:
        raise _Unclear(f"{info.attribute} has one block, so what it hands on cannot be seen")
    roles = {_roles(before, after) for before, after in itertools.pairwise(calls)}
    if len(roles) > 1:
        raise _Unclear(f"blocks of {info.attribute} do not agree on what they hand on")
    inside = {value.key for call in calls[:-1] for value in call.returned if value is not None}
    if any(event.key in inside for event in events if isinstance(event, Touch)):
        raise _Unclear(f"what blocks of {info.attribute} return is also used outside of them")
    if any(inside & set(event.parts) for event in events if isinstance(event, Join)):
        raise _Unclear(f"what blocks of {info.attribute} return is put together outside of them")
    return _Streams(info, calls, roles.pop())


def _roles(before: BlockCall, after: BlockCall) -> tuple[str, ...]:
    """For each result of a block, the parameter of the next block that it becomes."""
    where = f"{before.attribute} {before.index}"
    roles = []
    for place, value in enumerate(before.returned):
        names = [] if value is None else [name for name, given in after.given.items() if given.key == value.key]
        if value is None or len(names) != 1:
            raise _Unclear(f"result {place} of {where} is not a stream of block {after.index}")
        if after.given[names[0]].content != value.content:
            raise _Unclear(f"result {place} of {where} was changed in place before block {after.index} was done")
        roles.append(names[0])
    if len(set(roles)) != len(roles) or not roles:
        raise _Unclear(f"{where} returns the same stream twice, or none")
    return tuple(roles)


# ---- from list to list -------------------------------------------------------------------------------


def _joins(before: _Streams, after: _Streams, events: Sequence[Event]) -> tuple[str, ...] | None:
    """How `after` goes on from `before`: () stream by stream, names where joined, None where it does not."""
    handed = before.last()
    names = {value.key: name for name, value in handed.items()}
    given = after.blocks[0].given
    joins = [event for event in events if isinstance(event, Join) and set(names) & set(event.parts)]
    touched = {event.key for event in events if isinstance(event, Touch)}
    if touched & (set(names) | {join.made.key for join in joins}):
        return None  # used by someone else as well, who would miss what skipped blocks did to it
    if not joins and all(name in handed and given.get(name) == handed[name] for name in after.roles):
        return ()
    if len(joins) != 1 or len(after.roles) != 1 or given.get(after.roles[0]) != joins[0].made:
        return None
    return tuple(names[key] for key in joins[0].parts) if set(joins[0].parts) <= set(names) else None


def _used(call: BlockCall, events: Sequence[Event]) -> set[int]:
    """Keys of a block's results that anything outside the stack, or a later block, takes."""
    keys = {value.key for value in call.returned if value is not None}
    later = _blocks(events[list(events).index(call) + 1 :])
    taken = {value.key for block in later for value in block.given.values()}
    joined = {key for event in events if isinstance(event, Join) for key in event.parts}
    touched = {event.key for event in events if isinstance(event, Touch)}
    return keys & (taken | joined | touched)
