"""Words, sentences and other units that the checks count. Regular expressions of linear cost, English only."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

_WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
_EMOJI_CHARS = (
    "\u203c\u2049\u2139\u2194-\u21aa\u2300-\u23ff\u25aa-\u25fe\u2600-\u27bf\u2934\u2935\u2b00-\u2bff\u3030\u303d"
    "\u3297\u3299\U0001f000-\U0001faff"
)
_EMOJI_JOINERS = "\u200d\u20e3\ufe0f\U000e0020-\U000e007f"
_EMOJI_AT_END = re.compile(f"[{_EMOJI_CHARS}][{_EMOJI_JOINERS}{_EMOJI_CHARS}]*$|[0-9#*]\ufe0f?\u20e3$")
_CLOSERS = "\"'”’)\\]}*_"
_SENTENCE_END = re.compile(
    rf"(?:[.!?…‽]+[{_CLOSERS}]*(?:\s*[{_EMOJI_CHARS}][{_EMOJI_JOINERS}{_EMOJI_CHARS}]*)*(?=\s|$))|\n[ \t]*\n\s*"
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"“])(?:(?:[A-Za-z]\.)+[A-Za-z]|[A-Z]|Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|cf|al|No|Fig|Eq|Vol|pp|approx"
    r"|dept|est|Inc|Ltd|Co|\d+)\.$"
)
_GLIDE = re.compile(r"qu|gu(?=[aeiouy])")
_VOWELS_APART = re.compile(
    r"(?<![tcsxg])i[aou]|ea$|creat(?!ure)|^react|[pcn]oe[mt]|eo(?!u|pl)|u[ao]|[aeiouy]ing"
    r"|sm$|thm$|scienc|qiet|diet|client|societ|variet|anxiet"
)
"""Neighbouring vowels that are spoken as two syllables."""
_SILENT_E = re.compile(r"[^laeiouy]e$|[aeiouy]le$|[^aeiouytd]ed$|[^laeiouysxzcgh]es$|[aeiouy]les$")


def words(text: str) -> list[str]:
    """Runs of letters and digits; an apostrophe or hyphen inside belongs to the word."""
    return _WORD.findall(text)


def lower_words(text: str) -> list[str]:
    return [word.casefold() for word in words(text)]


def sentences(text: str) -> list[str]:
    """Pieces that end in . ! ? (with closing quotes and emoji behind it) or at a blank line, and hold a word.

    The point of an abbreviation, an initial or a list number ends no sentence.
    """
    pieces, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        head, rest = text[max(start, match.start() - 12) : match.end()], text[match.end() : match.end() + 20].lstrip()
        abbreviated = match.group().strip() == "." and rest and _ABBREVIATION.search(head)
        if abbreviated and (rest[0].islower() or not head.endswith("etc.")):
            continue
        pieces.append(text[start : match.end()].strip())
        start = match.end()
    pieces.append(text[start:].strip())
    return [piece for piece in pieces if _WORD.search(piece)]


def sentence_kind(sentence: str) -> str:
    """`?`, `!`, or `.` for everything else; a mixture such as ?! counts as what it starts with."""
    mark = re.search(rf"([.!?…‽])[.!?…‽]*[{_CLOSERS}\s{_EMOJI_CHARS}{_EMOJI_JOINERS}]*$", sentence)
    return mark.group(1) if mark and mark.group(1) in "?!" else "."


def ends_in_emoji(sentence: str) -> bool:
    return _EMOJI_AT_END.search(sentence.rstrip(" \t\r\n.!?,;:…" + "\"'”’)]}*_")) is not None


def lines(text: str) -> list[str]:
    """Lines that are not blank, with their indentation."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def letters(text: str) -> str:
    """Lower-case letters of a text without accents."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in plain if c.isalpha() and c.isascii())


def syllables(word: str) -> int:
    """Syllables of an English word: vowel groups, less a silent e. A rule, so exceptions are miscounted."""
    plain = _GLIDE.sub("q", letters(word))
    if not plain:
        return 0
    count = len(re.findall("[aeiouy]+", plain)) + len(_VOWELS_APART.findall(plain))
    count -= _SILENT_E.search(plain) is not None
    return max(1, count)


def increases(values: list[int]) -> bool:
    """Two values at least, each greater than the one before."""
    return len(values) > 1 and all(a < b for a, b in pairwise(values))


def without_fence(text: str) -> str:
    """The inside of a response that is one fenced block."""
    match = re.fullmatch(r"\s*```[^\n]*\n(.*?)\n?```\s*", text, re.DOTALL)
    return match.group(1) if match else text.strip("\n")


def unaccented(text: str) -> str:
    """Case-folded, without accents, single spaces."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(c for c in plain if not unicodedata.combining(c)).replace("’", "'")
    return " ".join(plain.split())
