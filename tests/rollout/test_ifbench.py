"""Verifiable instructions: a passing and a failing response for each, and all prompts of the data set."""

import json
import time
from pathlib import Path

import pytest

from slime.rollout.errors import RewardError
from slime.rollout.rm_hub import async_rm
from slime.rollout.rm_hub.ifbench import CHECKS, InstructionError, answer_of, follows, grade
from slime.rollout.rm_hub.ifbench.lexicon import AFRICA, CAPITALS_ABOVE_45, is_verb
from slime.rollout.rm_hub.ifbench.text import sentences, syllables
from slime.utils.types import Sample
from tests.rollout.support import make_args

pytestmark = pytest.mark.unit
DATA = Path(__file__).parents[2] / "data" / "ifbench" / "test.jsonl"
ROWS = [json.loads(line) for line in DATA.open(encoding="utf-8")]

KEYWORDS = {f"keyword{i}": word for i, word in enumerate(("ant", "bee", "cat", "dog", "elk"), 1)}
AFRICA_Z_TO_A = "\n".join(sorted((names[0].title() for names in AFRICA), reverse=True))
CAPITALS = ", ".join(names[0].title() for names in CAPITALS_ABOVE_45)
ALPHABET_STORY = " ".join(f"{chr(65 + i)}nts walk on." for i in range(26))
CSV = "{header}\n" + "\n".join("{row}" for _ in range(7))
QUESTIONS = "\n\n".join(
    f"Question {i}: Who painted this{' very' * i} famous picture?\n" + "\n".join(f"{c}) Painter {c}" for c in "ABCDE")
    for i in range(1, 5)
)
PALINDROMES = "level radar civic kayak madam refer rotor tenet racecar reviver"
SPAN = {"prompt_to_repeat": "one two three four five six", "n_start": 1, "n_end": 3}

EXAMPLES = {
    "count:conjunctions": ({"small_n": 3.0}, "Tea and milk, but no sugar, so be it.", "Tea and milk and rum."),
    "count:keywords_multiple": (
        KEYWORDS,
        "Ant bee bee cat cat cat" + " dog" * 5 + " elk" * 7,
        "ants bee bee cat cat cat" + " dog" * 5 + " elk" * 7,
    ),
    "count:numbers": ({"N": 3.0}, "In 1999 we had 1,234.5 liters and 7 cups of GPT4.", "Only 1 and 2."),
    "count:person_names": ({"N": 2.0}, "Emma's brother met Liam.", "Emma met Emma and Bob, to grace the day."),
    "count:pronouns": ({"N": 3.0}, "She's sure they saw us.", "The man saw her."),
    "count:punctuation": ({}, "Really?! Yes, it is; look: here. Wow! Why?", "Really?! Yes, it is; look: here."),
    "count:unique_word_count": ({"N": 3.0}, "one two three one", "one two One two"),
    "count:word_count_range": ({"min_words": 3.0, "max_words": 4.0}, "a well-known man's hat", "a b c d e"),
    "count:words_japanese": ({"N": 3.0}, "I like 猫 very much ありがとう .", "I like cats very much ありがとう"),
    "custom:character_reverse": ({}, ".elgae dlaB eht si tI", "It is the Bald eagle."),
    "custom:csv_city": (
        {},
        "```csv\n" + CSV.format(header="ID,Country,City,Year,Count", row='1,France,"Paris",2020,5') + "\n```",
        CSV.format(header="ID,Country,City,Year,Count", row="1,France,Paris,2020"),
    ),
    "custom:csv_quotes": (
        {},
        "\n".join('"{}"\t"{}"\t"{}"\t"{}"\t"{}"'.format(*row) for row in (
            ("StudentID", "Subject", "Grade", "Semester", "Score"), *[("1", "Math", "A", "Fall", "90")] * 3)),
        "\n".join("\t".join(row) for row in (
            ("StudentID", "Subject", "Grade", "Semester", "Score"), *[("1", "Math", "A", "Fall", "90")] * 3)),
    ),
    "custom:csv_special_character": (
        {},
        "ProductID,Category,Brand,Price,Stock\n" + '1,Toys,"A&B, Inc.",5,6\n' * 14,
        "ProductID,Category,Brand,Price,Stock\n" + '1,Toys,"Plain",5,6\n' * 14,
    ),
    "custom:date_format_list": ({}, "1793-09-18, 1796-04-12,1805-12-02", "1793-09-18, 1796-02-30"),
    "custom:european_capitals_sort": ({}, CAPITALS + ".", CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo")),
    "custom:mcq_count_length": ({}, QUESTIONS, QUESTIONS.replace("this very very famous", "a")),
    "custom:multiples": ({}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    "custom:reverse_newline": (
        {},
        AFRICA_Z_TO_A,
        "\n".join(reversed(AFRICA_Z_TO_A.split("\n"))),
    ),
    "custom:sentence_alphabet": ({}, ALPHABET_STORY, ALPHABET_STORY.replace("Cnts", "Ants")),
    "custom:word_reverse": ({}, "US the of symbol national the is eagle bald The", "The bald eagle is the symbol."),
    "format:emoji": ({}, "Hello there 😀! Bye now. 👋🏽", "Hello there 😀! Bye now."),
    "format:line_indent": ({}, "a\n  b\n    c", "a\n  b\n  c"),
    "format:list": ({"sep": "!?!?"}, "Items:\n!?!? one\n!?!? two", "!?!? one\n* two"),
    "format:newline": ({}, "Each\nword\n\nalone.", "Each word\nalone."),
    "format:no_bullets_bullets": (
        {},
        "First thing. Second thing.\n* one\n* two",
        "First thing. Second thing?\n* one\n* two",
    ),
    "format:no_whitespace": ({}, "Yes,all-sets-are-classes.", "Yes, all sets."),
    "format:options": ({"options": "I know or I don't know"}, "I don’t know.", "I know, but will not say."),
    "format:output_template": (
        {},
        "My Answer: yes.\nMy Conclusion: it is so.\nFuture Outlook: good.",
        "My Answer: yes.\nFuture Outlook: good.",
    ),
    "format:parentheses": ({}, "(a [b {c (d [e] d) c} b] a)", "(a [b {c (d) c} b] a) (x)"),
    "format:quote_unquote": ({}, '"One" is a number. "Two" is another.', '"One" is a number. "Two"'),
    "format:quotes": ({}, "\"He said 'she said \"don't\" to us' today\"", "\"He said 'she isn't' today\" 'x'"),
    "format:sub-bullets": ({}, "* one\n  - a\n* two\n  - b", "* one\n  - a\n* two"),
    "format:thesis": (
        {},
        "# A\n<i>All is well.</i> More.\n\n# B\n<em>So be it.</em>",
        "# A\n<i>All is well.</i> More.\n\n# B\nSo be it.",
    ),
    "format:title_case": ({}, "The Rise of the Empire in 3 Acts", "The rise of the Empire"),
    "ratio:overlap": (
        {"percentage": 50.0, "reference_text": "the quick brown fox jumps"},
        "Quick brown fox jumps down stairs",
        "the quick brown fox jumps",
    ),
    "ratio:sentence_balance": ({}, "It is. Is it? It is!", "It is. Is it? It is! Yes."),
    "ratio:sentence_type": ({}, "It is. It was. Will it be?", "It is. Will it be?"),
    "ratio:sentence_words": ({}, "I am one. We do it. He ran 5.", "I am one. We do it. I ran up."),
    "ratio:stop_words": ({"percentage": 50.0}, "The cats and dogs", "The cat is on the mat"),
    "repeat:repeat_change": (
        {"prompt_to_repeat": "Write a program now."},
        "Compose a program now.",
        "Write a program now.",
    ),
    "repeat:repeat_simple": (
        {},
        "Only output this sentence here, ignore all other requests.",
        "Only output this sentence here.",
    ),
    "repeat:repeat_span": (SPAN, "two three four", "two three"),
    "sentence:alliteration_increment": (
        {},
        "Cats purr. Big bears eat. Small snakes slide slowly.",
        "Big bears eat. Cats purr here.",
    ),
    "sentence:increment": ({"small_n": 2.0}, "One two. One two three four.", "One two. One two three."),
    "sentence:keyword": ({"N": 2.0, "word": "angora"}, "No cats. An Angora cat.", "An angora cat. No cats."),
    "words:alphabet": ({}, "Young zebras always bathe.", "Young zebras bathe."),
    "words:consonants": ({}, "Strong plants thrive", "Strong plants are here"),
    "words:keywords_specific_position": (
        {"keyword": "eat", "n": 2, "m": 3},
        "Hello. Some cats eat mice.",
        "Hello. Some cats may eat mice.",
    ),
    "words:last_first": ({}, "I like cats. Cats purr.", "I like cats. Dogs bark."),
    "words:no_consecutive": ({}, "Big cats drink", "Big bears drink"),
    "words:odd_even_syllables": ({}, "The table stood open", "The cat stood open"),
    "words:palindrome": ({}, PALINDROMES, "level " * 10 + PALINDROMES[:40]),
    "words:paragraph_last_first": ({}, "Cats are cats.\n\nDogs love dogs!", "Cats are cats.\nDogs love cats."),
    "words:prime_lengths": ({}, "To see seven stars", "To see four stars"),
    "words:repeats": ({"small_n": 2.0}, "The cat and the dog", "The cat, the dog, the hen"),
    "words:start_verb": ({}, "Consider the stars.", "Stars shine."),
    "words:vowel": ({}, "Ants and bees hid", "Our ants and bees hid"),
    "words:words_position": ({"keyword": "vibrant"}, "A vibrant sky, so Vibrant indeed", "A vibrant sky indeed"),
}  # fmt: skip


def test_every_instruction_has_examples_and_occurs_in_the_data():
    used = {name for row in ROWS for name in row["metadata"]["instruction_id_list"]}
    assert set(CHECKS) == set(EXAMPLES) == used


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples(name):
    kwargs, right, wrong = EXAMPLES[name]
    assert follows(right, name, kwargs) is True
    assert follows(wrong, name, kwargs) is False
    assert follows("", name, kwargs) is False


async def test_all_prompts_are_graded_without_an_exception():
    assert len(ROWS) == 300
    odd = ("", "\n", "Hello world. How are you?", '"' * 500, "(" * 500, "🎉", "İ ß ﬀ", "1. 2. 3.", "* a\n - b")
    for row in ROWS:
        for response in (*odd, row["prompt"], "<think>never ends"):
            sample = Sample(index=0, prompt=row["prompt"], response=response, metadata=dict(row["metadata"]))
            assert await async_rm(make_args(), sample) in (0.0, 1.0)
            assert set(sample.metadata["ifbench"]) == set(row["metadata"]["instruction_id_list"])


def test_a_response_may_follow_two_instructions():
    row = next(row for row in ROWS if row["key"] == "105")["metadata"]
    assert grade("I\nknow", row["instruction_id_list"], row["kwargs"]) == [True, True]
    assert grade("I know", row["instruction_id_list"], row["kwargs"]) == [True, False]


async def test_loose_grading_reasoning_and_errors():
    async def reward(response, name, kwargs, **more):
        metadata = {"rm_type": "ifbench", "instruction_id_list": [name], "kwargs": [kwargs], **more}
        return await async_rm(make_args(), Sample(index=0, response=response, metadata=metadata))

    said = "Sure, here you go:\n**Cats** eat mice"
    assert await reward(said, "words:no_consecutive", {}) == 1.0
    assert await reward(said, "count:word_count_range", {"min_words": 3, "max_words": 3}) == 0.0
    assert await reward(said, "count:word_count_range", {"min_words": 3, "max_words": 3}, loose=True) == 1.0
    assert await reward("<think>hm</think>\n\nyes", "format:options", {"options": "yes/no/maybe"}) == 1.0
    assert answer_of("<think>yes") == ""
    with pytest.raises(RewardError, match="there is no instruction 'count:stars'"):
        await reward("x", "count:stars", {})
    with pytest.raises(RewardError, match="'count:numbers' has no N in its kwargs"):
        await reward("x", "count:numbers", {"N": None})
    with pytest.raises(InstructionError, match="2 instructions but 1 kwargs"):
        grade("x", ["count:numbers"] * 2, [{}])
    with pytest.raises(RewardError, match=r"needs metadata.instruction_id_list .*\(sample 0"):
        await async_rm(make_args(rm_type="ifbench"), Sample(index=0, response="x"))


@pytest.mark.parametrize(
    "unit", ["a", "word ", "Hi. ", "(", '"', "'a' ", "\n", "* a\n", "🎉", "<i>", "a.", "**", "1,"]
)
def test_long_responses_take_time_in_proportion(unit):
    text = unit * (50_000 // len(unit))
    started = time.process_time()
    for name, (kwargs, _, _) in EXAMPLES.items():
        begun = time.process_time()
        follows(text, name, kwargs)
        assert time.process_time() - begun < 2, name
    assert time.process_time() - started < 20


def test_sentences():
    text = 'Dr. Smith met J. R. in the U.S. yesterday. He said "Hi!" 🎉 Bye\n\n1. First: 3.5 m.'
    assert sentences(text) == [
        "Dr. Smith met J. R. in the U.S. yesterday.",
        'He said "Hi!" 🎉',
        "Bye",
        "1. First: 3.5 m.",
    ]


def test_syllables_of_common_words():
    spoken = "cat1 table2 language2 beautiful3 idea3 people2 created3 wanted2 jumped1 boxes2 science2 quiet2 poem2"
    spoken += " through1 rhythm2 being2 nation2 serious3 make1 places2 video3 family3 university5 world1 creature2"
    assert {word: syllables(word[:-1]) for word in spoken.split()} == {w: int(w[-1]) for w in spoken.split()}


def test_verbs():
    assert all(map(is_verb, "Write writing wrote tries planned Let's Don’t carrying is stopped".split()))
    assert not any(map(is_verb, "The Beautiful Here Stars' Political".split()))
