"""The quickstart's result, read from the run directories, as console lines and as one self-contained HTML page."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from html import escape
from pathlib import Path

from slime.quickstart.plot import line_plot
from slime.quickstart.recipe import GREEDY, SAMPLED, Paths, Recipe
from slime.quickstart.tasks import KNOWN_VERBS, Task

Points = list[tuple[float, float]]
BAR_WIDTH = 40

PLOTS = (
    ("SFT loss", "sft", "train/step", "train/loss", "optimizer step"),
    ("Reward", "grpo", "rollout/step", "rollout/raw_reward", "rollout"),
    ("KL to the SFT model", "grpo", "rollout/step", "train/kl_loss", "rollout"),
    ("Entropy", "grpo", "rollout/step", "train/entropy_loss", "rollout"),
    ("Response length (tokens)", "grpo", "rollout/step", "rollout/response_len/mean", "rollout"),
    ("Gradient norm", "grpo", "rollout/step", "train/grad_norm", "rollout"),
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.headline { font-size: 1.6rem; font-weight: 600; color: #0a6640; margin: .2rem 0 1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; }
td, th { border-top: 1px solid #d8dee4; padding: .4rem .6rem; vertical-align: top; }
.right { background: #e6f6ec; } .wrong { background: #fdeceb; }
td.answer { white-space: pre-line; font-family: ui-monospace, monospace; font-size: 13px; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; font-size: 12px; white-space: pre-wrap; }
"""


@dataclass(frozen=True)
class Outcome:
    """What the two runs left behind.

    `metrics` holds the lines of each run's metrics.jsonl; `before` and `after` the same held-out prompts, answered
    greedily.
    """

    recipe: Recipe
    paths: Paths
    metrics: dict[str, list[dict]]
    before: list[dict]
    after: list[dict]

    @classmethod
    def read(cls, recipe: Recipe, paths: Paths) -> Outcome:
        samples = paths.grpo_run / "samples"
        return cls(
            recipe,
            paths,
            metrics={
                "sft": _read_jsonl(paths.sft_run / "metrics.jsonl"),
                "grpo": _read_jsonl(paths.grpo_run / "metrics.jsonl"),
            },
            before=_read_jsonl(samples / f"eval_{GREEDY}_{0:06d}.jsonl"),
            after=_read_jsonl(samples / f"eval_{GREEDY}_{recipe.rollouts:06d}.jsonl"),
        )

    def series(self, run: str, axis: str, key: str) -> Points:
        """A metric over a step axis. Train metrics of GRPO, logged once per rollout, can be had over rollouts."""
        lines = [line for line in self.metrics[run] if key in line]
        if axis == "rollout/step" and key.startswith("train/"):
            return [(i, line[key]) for i, line in enumerate(lines)]
        return [(line[axis], line[key]) for line in lines]

    @property
    def sampled(self) -> Points:
        """(rollouts done, held-out accuracy at temperature 1)"""
        return self.series("grpo", "eval/step", f"eval/{SAMPLED}")

    @property
    def greedy(self) -> Points:
        """(rollouts done, held-out accuracy of greedy decoding), the quickstart's result."""
        return self.series("grpo", "eval/step", f"eval/{GREEDY}")

    def curve(self) -> str:
        """Held-out accuracy as bars of text."""
        lines = ["held-out accuracy, greedy decoding"]
        for step, accuracy in self.greedy:
            bar = "█" * round(accuracy * BAR_WIDTH)
            lines.append(f"{step:5.0f} rollouts  {accuracy:.2f}  {bar}")
        return "\n".join(lines)

    def headline(self) -> str:
        first, last = self.greedy[0][1], self.greedy[-1][1]
        return f"held-out accuracy {first:.2f} -> {last:.2f} (seed {self.recipe.seed})"


def write_report(outcome: Outcome, task: Task, commands: dict[str, list[str]], seconds: dict[str, float]) -> None:
    """Write `report.html`: no scripts, nothing fetched."""
    accuracy = line_plot(
        "Held-out accuracy",
        {"temperature 1": outcome.sampled, "greedy": outcome.greedy},
        x_label="rollout",
        y_range=(0.0, 1.0),
    )
    others = [
        line_plot(title, {"": points}, x_label=x_label)
        for title, run, axis, key, x_label in PLOTS
        if (points := outcome.series(run, axis, key))
    ]
    times = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    text = "".join(f"<h3>{name}</h3><pre>slime train {escape(shlex.join(f))}</pre>" for name, f in commands.items())
    layout = "two engines apart from the trainer" if outcome.recipe.disaggregate else "engine and trainer colocated"
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>slime quickstart</title><style>{STYLE}</style></head><body>
<h1>slime quickstart</h1>
<p class="headline">{escape(outcome.headline())}</p>
<p>{_explanation(task)}</p>
<p>{escape(times)}; {layout}.</p>
<h2>Learning</h2><div class="plots">{accuracy}{''.join(others)}</div>
<h2>Made-up verbs</h2>{_meanings(task)}
<h2>Held-out problems, answered before and after RL</h2>{_completions(outcome)}
<h2>The two commands</h2>{text}
</body></html>
"""
    outcome.paths.report.write_text(page)


def _explanation(task: Task) -> str:
    return (
        "A random Qwen3 of two layers first learns the form of an answer from demonstrations (SFT). These only guess "
        "what the made-up verbs mean, so imitation alone cannot tell either. GRPO then answers other problems eight "
        "times each and learns from one bit per answer: right or wrong. The held-out problems are "
        f"{len(task.held_out)} calculations that occur neither in SFT nor in RL. Before and after RL they are asked "
        "in the same words and graded by the same reward. The headline is greedy decoding; the plot also has answers "
        "sampled at temperature 1, as in training."
    )


def _meanings(task: Task) -> str:
    rows = "".join(
        f"<tr><td>{escape(verb)}</td><td>{'gains' if sign == '+' else 'loses'}</td>"
        f"<td>{'right' if verb in KNOWN_VERBS else 'a coin flip each time'}</td></tr>"
        for verb, sign in task.meaning.items()
    )
    return f"<table><tr><th>verb</th><th>secretly means</th><th>in the demonstrations</th></tr>{rows}</table>"


def _completions(outcome: Outcome) -> str:
    after = {sample["index"]: sample for sample in outcome.after}
    rows = []
    for old in outcome.before:
        if old["index"] not in after:
            continue
        cells = "".join(_answer_cell(sample) for sample in (old, after[old["index"]]))
        rows.append(f"<tr><td>{escape(_question(old['prompt']))}</td><td>{escape(old['label'])}</td>{cells}</tr>")
    head = "<tr><th>problem</th><th>answer</th><th>before RL</th><th>after RL</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _answer_cell(sample: dict) -> str:
    verdict = "right" if sample["reward"] == 1 else "wrong"
    text = sample["response"].removesuffix("<|im_end|>").strip()
    return f'<td class="answer {verdict}">{escape(text)}</td>'


def _question(prompt: str | list[dict]) -> str:
    """The user's words, out of a message list or a rendered prompt."""
    if isinstance(prompt, list):
        return prompt[-1]["content"]
    found = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    return found.group(1) if found else prompt


def _read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
