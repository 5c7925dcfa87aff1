"""`slime data check FILE ...`: every row that a run would trip over, with file, line and key.

Reads what a run reads, with the same code: `slime train` stops at the first such row, this lists them all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator

from slime.arguments.families.reward import BOXED, RM_TYPES
from slime.rollout.rm_hub.ifbench import CHECKS
from slime.utils.data import PromptRows
from slime.utils.processing_utils import load_tokenizer
from slime.utils.rows import DataError
from slime.utils.types import Sample

NEED_LABELS = ("math", "deepscaler", "dapo", "f1", "gpqa")


def check_file(path: str, options: argparse.Namespace, report) -> tuple[int, int]:
    """(rows, rows with a problem) of one file; `report(text)` gets a line per problem and a summary.

    Raises:
        DataError: the file as a whole cannot be read.
    """
    tokenizer = load_tokenizer(options.hf_checkpoint) if options.hf_checkpoint else None
    rows = PromptRows(
        path,
        tokenizer,
        prompt_key=options.input_key,
        label_key=options.label_key,
        tool_key=options.tool_key,
        metadata_key=options.metadata_key,
        multimodal_keys=options.multimodal_keys,
        apply_chat_template=options.apply_chat_template,
        apply_chat_template_kwargs=options.apply_chat_template_kwargs,
    )
    bad, lengths, seen = 0, [], Counter()
    for row in range(len(rows)):
        try:
            sample = rows.build(row, render=tokenizer is not None)
            problems = list(_problems(sample, options))
            text = rows.text(sample.prompt) if tokenizer or isinstance(sample.prompt, str) else str(sample.prompt)
        except DataError as error:
            report(str(error))
            bad += 1
            continue
        for problem in problems:
            report(f"{rows.rows.where(row)}: {problem}")
        bad += bool(problems)
        lengths.append(len(tokenizer.encode(text, add_special_tokens=False)) if tokenizer else len(text))
        seen[hash(text)] += 1
    report(_summary(path, len(rows), bad, lengths, seen, options))
    return len(rows), bad


def _problems(sample: Sample, options: argparse.Namespace) -> Iterator[str]:
    """What the reward of this row would stumble over."""
    name = sample.metadata.get("rm_type") or options.rm_type
    if not isinstance(name, (str, type(None))) or (name and name not in (*RM_TYPES, *BOXED)):
        yield f"'metadata.rm_type' {name!r} is unknown; use one of {', '.join(RM_TYPES)}"
        return
    kind = (name or "").removeprefix("boxed_")
    if kind in NEED_LABELS and sample.label is None:
        yield f"--rm-type {name} needs a label: pass --label-key"
    if kind == "ifbench":
        ids, kwargs = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
        if not isinstance(ids, list) or not isinstance(kwargs, list) or len(ids) != len(kwargs):
            yield "'metadata' needs instruction_id_list and kwargs of one length for --rm-type ifbench"
            return
        for unknown in [i for i in ids if i not in CHECKS]:
            yield f"'metadata.instruction_id_list' names {unknown!r}, which is no instruction"


def _summary(path: str, count: int, bad: int, lengths: list[int], seen: Counter, options) -> str:
    unit = "tokens" if options.hf_checkpoint else "characters"
    parts = [f"{path}: {count} rows, {bad} with problems"]
    if lengths:
        ordered = sorted(lengths)
        at = {
            name: ordered[min(len(ordered) - 1, int(len(ordered) * q))]
            for name, q in (("median", 0.5), ("99 %", 0.99))
        }
        parts.append(f"prompts of {', '.join(f'{k} {v}' for k, v in at.items())}, longest {ordered[-1]} {unit}")
        if options.rollout_max_prompt_len and options.hf_checkpoint:
            parts.append(f"{sum(n > options.rollout_max_prompt_len for n in lengths)} would be dropped as too long")
    repeated = sum(count - 1 for count in seen.values())
    if repeated:
        parts.append(f"{repeated} repeated prompts")
    return "; ".join(parts)


def parser() -> argparse.ArgumentParser:
    """The flags have the names and meanings of `slime train`."""
    top = argparse.ArgumentParser(prog="slime data", description="Tools for prompt files.")
    check = top.add_subparsers(dest="command", required=True).add_parser(
        "check", help="list every row that a run would trip over", description=__doc__.split("\n")[0]
    )
    check.add_argument("files", nargs="+", metavar="FILE", help=".jsonl or .parquet, with an optional @[a:b]")
    check.add_argument("--input-key", default="input", help="column of the prompt (default: input)")
    check.add_argument("--label-key", help="column of the label")
    check.add_argument("--metadata-key", default="metadata", help="column of the metadata (default: metadata)")
    check.add_argument("--tool-key", help="column of tool schemas")
    check.add_argument("--multimodal-keys", type=json.loads, help="JSON object {image | video | audio: column}")
    check.add_argument("--apply-chat-template", action="store_true", help="render message lists (--hf-checkpoint)")
    check.add_argument("--apply-chat-template-kwargs", type=json.loads, default={}, help="JSON object")
    check.add_argument("--hf-checkpoint", help="render and count tokens with this checkpoint's tokenizer")
    check.add_argument("--rollout-max-prompt-len", type=int, help="count the prompts that are longer")
    check.add_argument("--rm-type", help="reward type of rows that name none")
    check.add_argument("--max-problems", type=int, default=100, help="lines printed per file (default: 100)")
    return top


def main(argv: list[str]) -> int:
    """Exit code 0: nothing found, 1: problems."""
    options = parser().parse_args(argv)
    found = 0
    for path in options.files:
        lines: list[str] = []
        try:
            _, bad = check_file(path, options, lines.append)
        except DataError as error:
            lines, bad = [str(error)], 1
        *problems, summary = lines
        for line in problems[: options.max_problems]:
            print(line)
        if len(problems) > options.max_problems:
            print(f"... and {len(problems) - options.max_problems} more (--max-problems)")
        print(summary)
        found += bad
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
