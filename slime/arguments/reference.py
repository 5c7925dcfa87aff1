"""The flag reference: `slime flags [WORD]` on the console, docs/flags.md as Markdown.

`python -m slime.arguments.reference > docs/flags.md` writes the page; a test keeps it current.
"""

from __future__ import annotations

import sys

from slime.arguments.families import FAMILIES
from slime.arguments.flag import APPEND, BOOL_ACTIONS, OPTIONAL_BOOL, Family, Flag
from slime.arguments.parser import ALL_FAMILIES, default_text, metavar

_INTRO = """# Flags

Generated from the tables in `slime/arguments/families/`: `make docs`, or
`python -m slime.arguments.reference > docs/flags.md`.

- Command line beats `--custom-config-path`, which beats the default. `--print-config` shows the result.
- Function paths are written `pkg.mod.fn` or `pkg.mod:fn`.
- A flag whose feature is not built yet is refused with "not available yet: ..."; those are listed under each table.
- Every mistake is reported before anything starts, all at once, with exit code 2.
"""


def markdown() -> str:
    """docs/flags.md."""
    return "\n".join([_INTRO, *(_family(family) for family in FAMILIES)])


def _family(family: Family) -> str:
    lines = [f"## {family.title}", "", family.intro, ""]
    available = [flag for flag in family.flags if not flag.pending]
    if available:
        lines += ["| flag | value | default | meaning |", "|---|---|---|---|"]
        lines += [_row(flag) for flag in available]
        lines.append("")
    pending = [flag for flag in family.flags if flag.pending]
    if pending:
        lines += ["Not available yet:", ""]
        for reason in dict.fromkeys(flag.pending for flag in pending):
            names = ", ".join(_names(flag) for flag in pending if flag.pending == reason)
            lines.append(f"- {reason}: {names}")
        lines.append("")
    return "\n".join(lines)


def _names(flag: Flag) -> str:
    names = list(flag.names)
    if flag.action == OPTIONAL_BOOL:
        names.append(f"--no-{flag.name[2:]}")
    return ", ".join(f"`{name}`" for name in names)


def _row(flag: Flag) -> str:
    meaning = flag.help
    for choice, reason in flag.pending_choices.items():
        meaning += f" `{choice}` is not available yet: {reason}."
    default = f"`{default_text(flag)}`" if default_text(flag) and flag.action not in BOOL_ACTIONS else ""
    cells = (_names(flag), _value(flag), default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(flag: Flag) -> str:
    if flag.action in BOOL_ACTIONS:
        return ""
    value = ", ".join(flag.choices) if flag.choices else metavar(flag)
    return f"{value} ..." if flag.nargs or flag.action == APPEND else value


def plain(word: str = "") -> str:
    """The flags whose name or meaning contains `word`, for the console."""
    lines: list[str] = []
    for family in ALL_FAMILIES:
        rows = [f for f in family.flags if word.lower().lstrip("-") in " ".join((*f.names, f.help)).lower()]
        if rows:
            lines.append(f"\n{family.title}")
        for flag in rows:
            note = f"not available yet: {flag.pending}" if flag.pending else flag.help
            shown = default_text(flag) if flag.action not in BOOL_ACTIONS else ""
            lines.append(f"  {' '.join((*flag.names, _value(flag))).strip()}{f'  [{shown}]' if shown else ''}")
            lines.append(f"      {note}")
    return "\n".join(lines).lstrip("\n")


def main(argv: list[str] | None = None) -> int:
    """`slime flags [WORD]`."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) > 1 or (argv and argv[0] in ("-h", "--help")):
        print("usage: slime flags [WORD]\n\nLists the flags of slime train that match WORD, or all.")
        return 0
    found = plain(argv[0] if argv else "")
    print(found or f"no flag matches {argv[0]}")
    return 0 if found else 1


if __name__ == "__main__":
    print(markdown(), end="")
