"""Tokenizers for the world's few words, in the ordinary CLIP and T5 formats.

Every word of the world is one token; other text falls back to bytes (CLIP) or letters (T5), so no
printable ASCII is unknown in either.
"""

from __future__ import annotations

import itertools
import string
from collections import Counter
from typing import TYPE_CHECKING

from . import scenes, world

if TYPE_CHECKING:
    from transformers import CLIPTokenizer, T5Tokenizer

TEXT_LENGTH = 32  # tokens, both encoders
SCENES_LENGTH = 24  # tokens of each CLIP encoder of the scenes world, the longest caption is 23


def words() -> list[str]:
    """All words of all captions, sorted; the comma counts as one."""
    attributes = [*world.SHAPES, *world.COLOURS, *world.SIZES, *world.GROUNDS]
    places = " ".join(world.PLACES).split()
    return sorted({*attributes, *places, "a", "at", "the", "in", "on", "background", ","})


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Pair merges that build every word as one symbol: most frequent pair first, ties alphabetical."""
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in pieces]
    merges: list[tuple[str, str]] = []
    while True:
        pairs = Counter(pair for symbols in spelled for pair in itertools.pairwise(symbols))
        if not pairs:
            return merges
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((left, right))
        for symbols in spelled:
            at = 0
            while at < len(symbols) - 1:
                if (symbols[at], symbols[at + 1]) == (left, right):
                    symbols[at : at + 2] = [left + right]
                at += 1


def clip_tokenizer() -> CLIPTokenizer:
    """A byte-level BPE tokenizer whose merges build each word; begin and end are the highest ids."""
    return _byte_pairs(words(), TEXT_LENGTH)


def scenes_tokenizer() -> CLIPTokenizer:
    """The same for the words of the scenes world, both CLIP encoders of which use it."""
    return _byte_pairs(scenes.words(), SCENES_LENGTH)


def _byte_pairs(pieces: list[str], length: int) -> CLIPTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    merges = _merges(pieces)
    symbols = [*alphabet, *(symbol + "</w>" for symbol in alphabet), *(left + right for left, right in merges)]
    vocab = {piece: index for index, piece in enumerate([*symbols, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer with one piece per word (pad 0, end 1, unknown 2) and letters as a fallback."""
    return _unigram(words())


def umt5_tokenizer() -> T5Tokenizer:
    """The same for the video world, which has a few more words."""
    return _unigram(sorted({*words(), *["moving", "standing", "still", "up", "down"]}))


def _unigram(pieces: list[str]) -> T5Tokenizer:
    from transformers import T5Tokenizer

    vocab: list[tuple[str, float]] = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -6.0)]
    for word in pieces:
        vocab.append(("\u2581" + word, -2.0))
    vocab.append((",", -2.0))
    seen = {piece for piece, _ in vocab}
    vocab += [(letter, -8.0) for letter in string.printable.strip() if letter not in seen]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=TEXT_LENGTH)
