"""Checks that count: words, names, numbers, and their shares of a response."""

from __future__ import annotations

import re
from collections import Counter

from slime.rollout.rm_hub.ifbench.lexicon import CONJUNCTIONS, NAMES, PRONOUNS, STOP_WORDS
from slime.rollout.rm_hub.ifbench.registry import check
from slime.rollout.rm_hub.ifbench.text import lower_words, sentence_kind, sentences, words

KEYWORD_COUNTS = (1, 2, 3, 5, 7)
OVERLAP_TOLERANCE = 2.0
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?:[.,]\d+)*")
_JAPANESE = re.compile("[\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9d]")


@check("count:conjunctions")
def conjunctions(response: str, small_n: int) -> bool:
    """At least n different coordinating conjunctions."""
    return len(CONJUNCTIONS & set(lower_words(response))) >= small_n


@check("count:keywords_multiple")
def keywords_multiple(
    response: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """The five keywords exactly once, twice, three, five and seven times."""
    counts = Counter(lower_words(response))
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    return [counts[keyword.casefold()] for keyword in keywords] == list(KEYWORD_COUNTS)


@check("count:numbers")
def numbers(response: str, N: int) -> bool:
    """Exactly N numbers in digits; 1,234.5 is one."""
    return len(_NUMBER.findall(response)) == N


@check("count:person_names")
def person_names(response: str, N: int) -> bool:
    """At least N different names of the list in the prompt."""
    found = {word.removesuffix("'s").removesuffix("’s").casefold() for word in words(response) if word[0].isupper()}
    return len(NAMES & found) >= N


@check("count:pronouns")
def pronouns(response: str, N: int) -> bool:
    """At least N personal, possessive or reflexive pronouns; a contraction such as she's counts."""
    return sum(re.split("['’]", word)[0] in PRONOUNS for word in lower_words(response)) >= N


@check("count:punctuation")
def punctuation(response: str) -> bool:
    """Each of . , ; : ! ? and an interrobang (?!), which does not stand for its parts."""
    rest, interrobangs = re.subn(r"\?!|!\?|‽", "", response)
    return interrobangs > 0 and all(mark in rest for mark in ".,;:!?")


@check("count:unique_word_count")
def unique_word_count(response: str, N: int) -> bool:
    """At least N different words."""
    return len(set(lower_words(response))) >= N


@check("count:word_count_range")
def word_count_range(response: str, min_words: int, max_words: int) -> bool:
    return min_words <= len(words(response)) <= max_words


@check("count:words_japanese")
def words_japanese(response: str, N: int) -> bool:
    """Every N-th word is written in Japanese script."""
    every = [word for word in response.split() if any(c.isalnum() for c in word)][int(N) - 1 :: int(N)]
    return bool(every) and all(_JAPANESE.search(word) for word in every)


@check("ratio:overlap")
def overlap(response: str, percentage: float, reference_text: str) -> bool:
    """This share, within two points, of the response's different word trigrams is in the reference text."""
    own, reference = _trigrams(response), _trigrams(reference_text)
    return bool(own) and abs(100 * len(own & reference) / len(own) - percentage) <= OVERLAP_TOLERANCE


def _trigrams(text: str) -> set[tuple[str, str, str]]:
    listed = lower_words(text)
    return set(zip(listed, listed[1:], listed[2:], strict=False))


@check("ratio:sentence_balance")
def sentence_balance(response: str) -> bool:
    """As many declarative as interrogative as exclamatory sentences."""
    kinds = Counter(map(sentence_kind, sentences(response)))
    return kinds["."] == kinds["?"] == kinds["!"] > 0


@check("ratio:sentence_type")
def sentence_type(response: str) -> bool:
    """Two declarative sentences for each interrogative one."""
    kinds = Counter(map(sentence_kind, sentences(response)))
    return kinds["."] == 2 * kinds["?"] > 0


@check("ratio:sentence_words")
def sentence_words(response: str) -> bool:
    """Three sentences of the same number of characters, in which no word occurs twice."""
    listed = sentences(response)
    spoken = lower_words(response)
    return len(listed) == 3 and len(set(map(len, listed))) == 1 and len(set(spoken)) == len(spoken)


@check("ratio:stop_words")
def stop_words(response: str, percentage: float) -> bool:
    """At most this share of the words are stop words."""
    listed = [word.replace("’", "'") for word in lower_words(response)]
    return bool(listed) and 100 * sum(word in STOP_WORDS for word in listed) <= percentage * len(listed)
