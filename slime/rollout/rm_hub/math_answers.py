"""Finding the final answer in a response and comparing plain numbers: linear time, no evaluation, no sympy.

Most answers of most data sets are plain numbers, fractions or words, and are decided here. What is left (algebra,
sets, intervals, matrices) goes to math-verify in a worker process.
"""

from __future__ import annotations

import re
from fractions import Fraction

TAIL = 2000
"""Characters at the end of a response in which an unmarked answer is looked for."""
MAX_DIGITS = 400
CLOSE = Fraction(1, 100)
"""Numbers that are further apart are never the same, however large they are."""

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")
_IN_TEXT = re.compile(
    r"(?<![\w.])-?(?:\\?[$€£¥]\s?)?-?(?:\d+\s+\d+/\d+|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)(?:\s*/\s*\d+)?\s?%?"
)
_STATED = re.compile(r"answer\s*(?:is|was|=|:)+\s*:?", re.IGNORECASE)
_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?:\s*[a-zA-Z]{2,}|\s+[gmshLlJNWVAK])(?:[\s/]+[a-zA-Z.]+)*(?:\s*\^?\s*\{?[23]\}?)?")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\u00a0|\u202f|\u2009")
_DECORATION = re.compile(r"\\(?:left|right|displaystyle|bigl|bigr|big)(?![a-zA-Z])")
_THIN_SPACE_IN_NUMBER = re.compile(r"(?<=\d)(?:\\[,:; !]|[\u202f\u2009\u00a0])(?=\d{3}(?!\d))")
_POWER_OF_TEN = re.compile(r"\s*(?:\\times|×|\*|[xX])\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|([+-]?\d{1,3})(?!\d))")
_ASSIGNMENT = re.compile(r"^[a-zA-Z](?:_\{?\w\}?)?\s*=\s*")
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NOT_UNITS = frozenset(
    ["half", "halves", "third", "thirds", "quarter", "quarters", "tenth", "tenths", "hundredth", "hundredths"]
    + [
        "plus",
        "minus",
        "times",
        "over",
        "squared",
        "cubed",
        "point",
        "divided",
        "multiplied",
        "mod",
        "or",
        "to",
        "not",
    ]
    + ["pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", *_SCALES]
)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} (or \\fbox{...}); None without one, or when its braces do not close."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    position = text.index("b", start) + (5 if text.startswith("\\boxed", start) else 3)
    while position < len(text) and text[position] == " ":
        position += 1
    if position >= len(text) or text[position] != "{":
        bare = re.match(r"[^\s$.,;}]+(?:[.,]\d+)*", text[position : position + 100])
        return bare.group(0) if bare else None
    depth = 0
    for i in range(position, len(text)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[position + 1 : i]
    return None


def label_answer(label: str) -> str:
    """The answer inside a label: after GSM8K's "####", inside \\boxed{}, or the label itself."""
    if "####" in label:
        return label.rsplit("####", 1)[1].strip()
    return (last_boxed(label) or label).strip()


def candidates(response: str) -> list[str]:
    """What may be meant as the final answer, best first: \\boxed{}, "#### x", "the answer is x", the last number."""
    boxed = last_boxed(response)
    if boxed is not None:
        return [boxed]
    if "####" in response:
        return _readings(response.rsplit("####", 1)[1][:TAIL].strip().split("\n", 1)[0])
    tail = response[-TAIL:]
    stated = list(_STATED.finditer(tail))
    if stated:
        after = tail[stated[-1].end() :].strip()
        if after:
            return _readings(re.split(r"\n|(?<!\d)\.\s|\.\s+(?=[A-Z])|\.$", after, maxsplit=1)[0])
    return [number.strip() for number in _IN_TEXT.findall(tail)[-1:]]


def _readings(sentence: str) -> list[str]:
    """A statement as a whole, then the formula in it, else the number in it (the last when it is an equation).

    What stands in bold at its start is the whole statement, and a statement that is a number is read as nothing else.
    """
    sentence = sentence.strip()
    bold = re.match(r"\*\*\s*([^*]+?)\s*\*\*", sentence)
    sentence = bold.group(1) if bold else sentence.strip("*").strip()
    found = [sentence]
    if as_number(sentence) is not None:
        return found
    formula = re.search(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", sentence)
    if formula:
        found.append(next(group for group in formula.groups() if group is not None))
    else:
        numbers = _IN_TEXT.findall(sentence)
        if numbers:
            found.append((numbers[-1] if "=" in sentence else numbers[0]).strip())
    return list(dict.fromkeys(found))


def normalize(answer: str) -> str:
    """One spelling for the many ways to write the same short answer. Keeps anything that could change its value."""
    text = answer.strip().strip("*").strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
    text = _THIN_SPACE_IN_NUMBER.sub("", text.replace("{,}", ","))
    text = _DECORATION.sub("", _SPACING.sub(" ", text))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = text.replace("\\$", "$").replace("\\%", "%").replace("\u2212", "-").replace("\\cdot", "*")
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", "", text)
    text = _TEXT.sub(r" \1", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()


def as_number(answer: str) -> tuple[Fraction, bool] | None:
    """(value, written as a percentage) of a plain number with optional currency, unit or scale word; else None."""
    text = _ASSIGNMENT.sub("", normalize(answer)[:MAX_DIGITS].replace("\\ ", " ")).strip()
    if len(answer) > MAX_DIGITS or not any(c.isdigit() for c in text):
        return None
    text = re.sub(r"^\(([^(),]*)\)$", r"\1", text).strip()
    text = re.sub(r"^([+-]?)\s*[$€£¥]\s*", r"\1", text)
    text = re.sub(r"\s*[$€£¥]$", "", text)
    value, rest = _leading_number(text)
    if value is None:
        return None
    rest = rest.strip()
    percent = False
    if rest.startswith("%") or re.match(r"(?i)per\s?cent\b", rest):
        percent = True
        rest = re.sub(r"^(?:%|(?i:per\s?cent))", "", rest).strip()
    word = re.match(r"[A-Za-z]+", rest)
    if word and word.group(0).lower() in _SCALES:
        value *= _SCALES[word.group(0).lower()]
        rest = rest[word.end() :].strip()
    if rest and not _is_unit(rest, attached=not text[: -len(rest)].endswith(" ")):
        return None
    return value, percent


def _is_unit(text: str, attached: bool) -> bool:
    if not _UNIT.fullmatch(text if attached else " " + text):
        return False
    return not any(word.lower() in _NOT_UNITS for word in re.findall(r"[A-Za-z]+", text))


def _leading_number(text: str) -> tuple[Fraction | None, str]:
    """The number that a text starts with (integer, decimal, a/b, \\frac{a}{b}, mixed), and what follows it."""
    sign, body = (-1, text[1:].lstrip()) if text.startswith("-") else (1, text.removeprefix("+").lstrip())
    frac = _FRAC.match(body)
    if frac:
        value = _ratio(frac.group(1) or frac.group(2), frac.group(3) or frac.group(4))
        return (None if value is None else sign * value), body[frac.end() :]
    match = _NUMBER.match(body)
    if not match.group(0) or body[0] in "+-":
        return None, text
    value, rest = _parse(match.group(0)), body[match.end() :]
    if value is None:
        return None, text
    power = _POWER_OF_TEN.match(rest)
    if power:
        return sign * value * Fraction(10) ** int(power.group(1) or power.group(2)), rest[power.end() :]
    mixed = re.match(r"\s*(?:\\frac\s*\{(\d+)\}\s*\{(\d+)\}|(?<=\s)(\d+)\s*/\s*(\d+))", rest) or re.match(
        r"\s+(?:and\s+)?()()(\d+)\s*/\s*(\d+)", rest
    )
    if mixed and value.denominator == 1:
        part = _ratio(mixed.group(1) or mixed.group(3), mixed.group(2) or mixed.group(4))
        return (None if part is None else sign * (value + part)), rest[mixed.end() :]
    over = re.match(r"\s*/\s*(\d[\d,]*(?:\.\d+)?)", rest)
    if over:
        value = _ratio(match.group(0), over.group(1))
        return (None if value is None else sign * value), rest[over.end() :]
    return sign * value, rest


def _parse(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text.strip())
    if not match or not any(c.isdigit() for c in text) or len(text) > MAX_DIGITS:
        return None
    try:
        return Fraction(text.strip().replace(",", ""))
    except ValueError:
        return None


def _ratio(numerator: str, denominator: str) -> Fraction | None:
    top, bottom = _parse(numerator), _parse(denominator)
    return None if top is None or not bottom else top / bottom


def cheap_equal(truth: str, answer: str) -> bool | None:
    """Whether two answers are the same; None when only algebra can tell.

    Non-integers agree to a relative 1e-6 (and 0.01). A percentage equals both its number and its hundredth
    (50% = 50 = 0.5) when the other side is not written as a percentage.
    """
    left, right = normalize(truth), normalize(answer)
    if left and left.casefold().replace(" ", "") == right.casefold().replace(" ", ""):
        return True
    a, b = as_number(truth), as_number(answer)
    if a is not None and b is not None:
        (x, x_percent), (y, y_percent) = a, b
        if x_percent == y_percent:
            return _close(x, y)
        return _close(x, y) or (_close(x, y / 100) if y_percent else _close(x / 100, y))
    if not right or (a is not None and not re.search(r"[\d\\^_]|[^\x00-\x7f]", right)):
        return False  # no text without any digit or command is a rational number
    return None


def _close(x: Fraction, y: Fraction) -> bool:
    if x == y:
        return True
    if x.denominator == 1 and y.denominator == 1:
        return False
    return abs(x - y) <= min(abs(x) / 10**6, CLOSE)
