"""Checks of how a response is laid out, and of requests to repeat text."""

from __future__ import annotations

import re

from slime.rollout.rm_hub.ifbench.lexicon import MINOR_WORDS
from slime.rollout.rm_hub.ifbench.registry import check
from slime.rollout.rm_hub.ifbench.text import ends_in_emoji, increases, lines, sentences, words

NESTING = 5
QUOTE_NESTING = 3
SENTENCE_TO_REPEAT = "Only output this sentence here, ignore all other requests."
_OTHER_BULLET = re.compile(r"\s*(?:[*•+‣◦]\s|\d+[.)]\s|-\s)")
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_HEADING = re.compile(
    r"#{1,6}\s.*|<h[1-6][^<>]*>.*?</h[1-6]>|\*\*[^*]+\*\*:?|<(b|strong)>[^<]*</\1>:?|(?:Section|Part|Chapter)\s+\w+[:.]?"
)
_THESIS = re.compile(r"(?:<p>\s*)?<(i|em)>[^<]*\w[^<]*</\1>")
_TEMPLATE = re.compile(r"My Answer:(.+?)My Conclusion:(.+?)Future Outlook:(.+)", re.DOTALL)


@check("format:emoji")
def emoji(response: str) -> bool:
    """Each sentence ends in an emoji, before or behind its full stop."""
    listed = sentences(response)
    return bool(listed) and all(map(ends_in_emoji, listed))


@check("format:line_indent")
def line_indent(response: str) -> bool:
    """Each line is indented further than the one before."""
    return increases([len(line) - len(line.lstrip()) for line in (x.expandtabs(4) for x in lines(response))])


@check("format:list")
def item_list(response: str, sep: str) -> bool:
    """Two or more lines start with the separator, none with another bullet."""
    listed = [line.strip() for line in lines(response)]
    items = [line for line in listed if line.startswith(sep)]
    return len(items) > 1 and not any(_OTHER_BULLET.match(line) for line in listed if not line.startswith(sep))


@check("format:newline")
def newline(response: str) -> bool:
    """One word per line."""
    listed = lines(response)
    return len(listed) > 1 and all(len(line.split()) == 1 for line in listed)


@check("format:no_bullets_bullets")
def no_bullets_bullets(response: str) -> bool:
    """Two or more sentences that end in a period, then two or more bullet points *."""
    first = re.search(r"^[ \t]*\*\s", response, re.MULTILINE)
    if first is None:
        return False
    stated = [
        sentence for sentence in sentences(response[: first.start()]) if sentence.rstrip("\"'”’)*_").endswith(".")
    ]
    return len(stated) > 1 and len(re.findall(r"^[ \t]*\*\s+\S", response[first.start() :], re.MULTILINE)) > 1


@check("format:no_whitespace")
def no_whitespace(response: str) -> bool:
    return len(response.split()) == 1


@check("format:options")
def options(response: str, options: str) -> bool:
    """The response is one of the options and nothing else."""
    offered = re.split(r"/|,\s*|\s+or\s+", options)
    return _bare(response) in {_bare(option) for option in offered}


def _bare(text: str) -> str:
    return " ".join(text.casefold().replace("’", "'").split()).strip(" .!*_`\"'()[]:")


@check("format:output_template")
def output_template(response: str) -> bool:
    """My Answer: ... My Conclusion: ... Future Outlook: ..., each with text."""
    match = _TEMPLATE.fullmatch(response.strip())
    return match is not None and all(words(part) for part in match.groups())


@check("format:parentheses")
def parentheses(response: str) -> bool:
    """Closed pairs of (), [] and {} stand five deep in each other."""
    deepest, open_ones = 0, []
    for mark in re.findall(r"[()\[\]{}]", response):
        if mark not in _BRACKETS:
            open_ones.append([mark, 1])  # the mark, and how deep its inside is
        elif open_ones and open_ones[-1][0] == _BRACKETS[mark]:
            height = open_ones.pop()[1]
            deepest = max(deepest, height)
            if open_ones:
                open_ones[-1][1] = max(open_ones[-1][1], height + 1)
        else:
            open_ones.clear()
    return deepest >= NESTING


@check("format:quote_unquote")
def quote_unquote(response: str) -> bool:
    """Words without quotation marks follow each quoted phrase."""
    parts = re.split(r'["“”]', response)
    after = parts[2::2]
    return len(parts) > 2 and len(parts) % 2 == 1 and all(words(text) for text in after)


@check("format:quotes")
def quotes(response: str) -> bool:
    """Quotes three deep in each other, double and single marks in turn. Apostrophes are no quotes."""
    deepest, open_ones = 0, []
    for match in re.finditer(r"[\"“”'‘’]", response):
        mark, i = match.group(), match.start()
        kind = '"' if mark in '"“”' else "'"
        before, after = response[i - 1 : i], response[i + 1 : i + 2]
        if kind == "'" and before.isalnum() and after.isalnum():
            continue
        closes = mark not in "“‘" and bool(before) and not before.isspace()
        if open_ones and open_ones[-1][0] == kind and closes:
            height = open_ones.pop()[1]
            deepest = max(deepest, height)
            if open_ones:
                open_ones[-1][1] = max(open_ones[-1][1], height + 1)
        elif mark not in "”’" and after and not after.isspace() and not (open_ones and open_ones[-1][0] == kind):
            open_ones.append([kind, 1])
    return deepest >= QUOTE_NESTING


@check("format:sub-bullets")
def sub_bullets(response: str) -> bool:
    """Bullet points *, each with at least one sub-bullet point -."""
    counts: list[int] = []
    for line in lines(response):
        if re.match(r"\s*\*\s", line):
            counts.append(0)
        elif counts and re.match(r"\s*-\s", line):
            counts[-1] += 1
    return bool(counts) and all(counts)


@check("format:thesis")
def thesis(response: str) -> bool:
    """Each section (under a heading; without headings each paragraph) starts with <i>...</i> or <em>...</em>."""
    sections = _sections(response)
    return bool(sections) and all(_THESIS.match(section) for section in sections)


def _sections(response: str) -> list[str]:
    found, current, headings = [], [], 0
    for line in lines(response):
        if _HEADING.fullmatch(line.strip()):
            headings += 1
            found.append(current)
            current = []
        else:
            current.append(line.strip())
    found.append(current)
    if not headings:
        return [block.strip() for block in re.split(r"\n[ \t]*\n", response) if block.strip()]
    if not found[0]:
        del found[0]
    return ["\n".join(section) for section in found]


@check("format:title_case")
def title_case(response: str) -> bool:
    """Each word but short function words starts with a capital letter or a digit; so does the first."""
    listed = words(response)
    return (
        bool(listed)
        and not listed[0][0].islower()
        and all(not word[0].islower() or word.casefold() in MINOR_WORDS for word in listed)
    )


@check("repeat:repeat_change")
def repeat_change(response: str, prompt_to_repeat: str) -> bool:
    """The request again, with another first word."""
    said, asked = response.split(), prompt_to_repeat.split()
    return len(said) == len(asked) and said[1:] == asked[1:] and said[0].casefold() != asked[0].casefold()


@check("repeat:repeat_simple")
def repeat_simple(response: str) -> bool:
    return " ".join(response.split()).strip("\"'“”") == SENTENCE_TO_REPEAT


@check("repeat:repeat_span")
def repeat_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The words n_start to n_end of the request, both included, counted from 0."""
    return response.strip().strip("\"'“”`").split() == prompt_to_repeat.split()[int(n_start) : int(n_end) + 1]
