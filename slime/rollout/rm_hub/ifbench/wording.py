"""Checks of which words and sentences follow each other."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise

from slime.rollout.rm_hub.ifbench.lexicon import is_verb
from slime.rollout.rm_hub.ifbench.registry import check
from slime.rollout.rm_hub.ifbench.text import increases, letters, lines, lower_words, sentences, syllables, words

PALINDROMES, PALINDROME_LENGTH = 10, 5
VOWEL_TYPES = 3


@check("sentence:alliteration_increment")
def alliteration_increment(response: str) -> bool:
    """The longest run of words with one first letter grows from sentence to sentence; a single word is no run."""

    def longest(sentence: str) -> int:
        runs = [len(list(run)) for _, run in groupby(word[0] for word in lower_words(sentence))]
        return max((run for run in runs if run > 1), default=0)

    return increases([longest(sentence) for sentence in sentences(response)])


@check("sentence:increment")
def sentence_increment(response: str, small_n: int) -> bool:
    """Each sentence has n words more than the one before."""
    counts = [len(words(sentence)) for sentence in sentences(response)]
    return len(counts) > 1 and all(b - a == small_n for a, b in pairwise(counts))


@check("sentence:keyword")
def sentence_keyword(response: str, word: str, N: int) -> bool:
    """The word is in the N-th sentence."""
    listed = sentences(response)
    return len(listed) >= N and word.casefold() in lower_words(listed[int(N) - 1])


@check("words:alphabet")
def alphabet(response: str) -> bool:
    """The first letters of the words walk through the alphabet, from any letter, and start over after z."""
    initials = [letters(word)[:1] for word in words(response)]
    return len(initials) > 1 and all(a and b and (ord(b) - ord(a)) % 26 == 1 for a, b in pairwise(initials))


@check("words:consonants")
def consonants(response: str) -> bool:
    """Each word has two consonants in a row."""
    listed = [word for word in map(letters, words(response)) if word]
    return bool(listed) and all(
        any(a not in "aeiou" and b not in "aeiou" for a, b in pairwise(word)) for word in listed
    )


@check("words:keywords_specific_position")
def keywords_specific_position(response: str, keyword: str, n: int, m: int) -> bool:
    """The keyword is the m-th word of the n-th sentence."""
    listed = sentences(response)
    spoken = lower_words(listed[int(n) - 1]) if len(listed) >= n else []
    return len(spoken) >= m and spoken[int(m) - 1] == keyword.casefold()


@check("words:last_first")
def last_first(response: str) -> bool:
    """The last word of each sentence is the first of the next."""
    spoken = [lower_words(sentence) for sentence in sentences(response)]
    return len(spoken) > 1 and all(a[-1] == b[0] for a, b in pairwise(spoken))


@check("words:no_consecutive")
def no_consecutive(response: str) -> bool:
    """No two words in a row have the same first letter."""
    spoken = lower_words(response)
    return bool(spoken) and all(a[0] != b[0] for a, b in pairwise(spoken))


@check("words:odd_even_syllables")
def odd_even_syllables(response: str) -> bool:
    """Words with odd and even numbers of syllables take turns."""
    counts = [count for count in map(syllables, words(response)) if count]
    return len(counts) > 1 and all((a + b) % 2 for a, b in pairwise(counts))


@check("words:palindrome")
def palindrome(response: str) -> bool:
    """At least 10 different palindromes of 5 or more letters."""
    found = {word for word in lower_words(response) if len(word) >= PALINDROME_LENGTH and word.isalpha()}
    return sum(word == word[::-1] for word in found) >= PALINDROMES


@check("words:paragraph_last_first")
def paragraph_last_first(response: str) -> bool:
    """Each paragraph (line) ends with the word that it starts with."""
    spoken = [lower_words(line) for line in lines(response)]
    return bool(spoken) and all(len(line) > 1 and line[0] == line[-1] for line in spoken)


@check("words:prime_lengths")
def prime_lengths(response: str) -> bool:
    """The number of letters and digits of each word is prime."""
    lengths = [sum(c.isalnum() for c in word) for word in words(response)]
    return bool(lengths) and all(_is_prime(length) for length in set(lengths))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@check("words:repeats")
def repeats(response: str, small_n: int) -> bool:
    """No word occurs more than n times."""
    counts = Counter(lower_words(response))
    return bool(counts) and max(counts.values()) <= small_n


@check("words:start_verb")
def start_verb(response: str) -> bool:
    """The first word is a verb."""
    spoken = words(response)
    return bool(spoken) and is_verb(spoken[0])


@check("words:vowel")
def vowel(response: str) -> bool:
    """At most three different vowels (of a, e, i, o, u) occur."""
    return 0 < len(set("aeiou") & set(letters(response))) <= VOWEL_TYPES


@check("words:words_position")
def words_position(response: str, keyword: str) -> bool:
    """The keyword is the second and the second to last word."""
    spoken = lower_words(response)
    return len(spoken) > 2 and spoken[1] == spoken[-2] == keyword.casefold()
