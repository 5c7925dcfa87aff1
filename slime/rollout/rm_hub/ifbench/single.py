"""Checks of the eleven requests that occur once (`custom:...`): the request itself is part of the check."""

from __future__ import annotations

import csv
import datetime
import re
import string
from itertools import pairwise

from slime.rollout.rm_hub.ifbench.lexicon import AFRICA, CAPITALS_ABOVE_45
from slime.rollout.rm_hub.ifbench.registry import check
from slime.rollout.rm_hub.ifbench.text import (
    increases,
    letters,
    lines,
    lower_words,
    sentences,
    unaccented,
    without_fence,
    words,
)

MULTIPLES = ["14", "21", "28", "35", "42", "49"]
QUESTIONS, CHOICES = 4, 5


@check("custom:character_reverse")
def character_reverse(response: str) -> bool:
    """Names the bald eagle, letter by letter from the end."""
    return "bald eagle" in " ".join(response.casefold()[::-1].split())


@check("custom:word_reverse")
def word_reverse(response: str) -> bool:
    """Names the bald eagle, word by word from the end."""
    spoken = lower_words(response)
    return ("eagle", "bald") in pairwise(spoken) and ("bald", "eagle") not in pairwise(spoken)


def _table(response: str, delimiter: str) -> list[list[str]]:
    rows = csv.reader(without_fence(response).splitlines(), delimiter=delimiter, skipinitialspace=delimiter == ",")
    try:
        return [[cell.strip() for cell in row] for row in rows if row]
    except csv.Error:
        return []


def _is_table(table: list[list[str]], header: list[str], rows: int) -> bool:
    filled = all(len(row) == len(header) and all(row) for row in table)
    return filled and len(table) == rows + 1 and table[0] == header


@check("custom:csv_city")
def csv_city(response: str) -> bool:
    return _is_table(_table(response, ","), ["ID", "Country", "City", "Year", "Count"], 7)


@check("custom:csv_special_character")
def csv_special_character(response: str) -> bool:
    """14 rows; a field in double quotes holds a character that is no letter, digit or space."""
    quoted = re.findall(r'(?:^|,)[ ]?"((?:[^"\n]|"")*)"(?=,|$)', without_fence(response), re.MULTILINE)
    special = any(re.search(r"[^\w\s]", field) for field in quoted)
    return special and _is_table(_table(response, ","), ["ProductID", "Category", "Brand", "Price", "Stock"], 14)


@check("custom:csv_quotes")
def csv_quotes(response: str) -> bool:
    """3 rows, separated by tabs; each field, also of the header, in double quotes."""
    cells = [cell for line in lines(without_fence(response)) for cell in line.split("\t")]
    quoted = all(re.fullmatch(r'"[^"]*"', cell.strip()) for cell in cells)
    header = ["StudentID", "Subject", "Grade", "Semester", "Score"]
    return quoted and _is_table(_table(response, "\t"), header, 3)


@check("custom:date_format_list")
def date_format_list(response: str) -> bool:
    """Dates YYYY-MM-DD separated by commas, and nothing else."""
    dates = [date.strip() for date in response.strip().rstrip(".").split(",")]
    return len(dates) > 1 and all(map(_is_date, dates))


def _is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return False
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


@check("custom:european_capitals_sort")
def european_capitals_sort(response: str) -> bool:
    """All capitals north of 45 degrees, from the north to the south."""
    named = [unaccented(name) for name in response.strip().rstrip(".").split(",")]
    return len(named) == len(CAPITALS_ABOVE_45) and all(
        name in spellings for name, spellings in zip(named, CAPITALS_ABOVE_45, strict=True)
    )


@check("custom:mcq_count_length")
def mcq_count_length(response: str) -> bool:
    """Four questions labelled "Question", five options each, every question longer than the one before."""
    blocks = re.split(r"^[ \t]*[*#]*[ \t]*Question\b", response, flags=re.MULTILINE)
    if blocks[0].strip() or len(blocks) != QUESTIONS + 1:
        return False
    lengths = []
    for block in blocks[1:]:
        listed = lines(block)
        is_option = [bool(re.match(r"\s*[-*]?\s*\(?[A-Ea-e1-5][).:]\s*\S", line)) for line in listed]
        first = is_option.index(True, 1) if True in is_option[1:] else 0
        if not first or sum(is_option[first:]) != CHOICES or len(listed) - first != CHOICES:
            return False
        stem = re.sub(r"^\s*\d*\s*[:.)]?[*\s]*", "", " ".join(listed[:first]))
        lengths.append(len(stem.strip()))
    return increases(lengths)


@check("custom:multiples")
def multiples(response: str) -> bool:
    """The multiples of 7 from 10 to 50, and no words."""
    return re.findall(r"\d+", response) == MULTIPLES and not re.search(r"[^\W\d]", response)


@check("custom:reverse_newline")
def reverse_newline(response: str) -> bool:
    """All countries of Africa, one per line, from Z to A as they are written."""
    named = [re.sub(r"^[\s*\-•]*(?:\d+[.)]\s*)?", "", unaccented(line)).rstrip(".,") for line in lines(response)]
    known = {spelling: i for i, spellings in enumerate(AFRICA) for spelling in spellings}
    if {known.get(name) for name in named} != set(range(len(AFRICA))) or len(named) != len(AFRICA):
        return False
    keys = [name.removeprefix("the ") for name in named]
    return all(a > b for a, b in pairwise(keys))


@check("custom:sentence_alphabet")
def sentence_alphabet(response: str) -> bool:
    """26 sentences that start with the letters of the alphabet in order."""
    initials = [letters(words(sentence)[0])[:1] for sentence in sentences(response)]
    return initials == list(string.ascii_lowercase)
