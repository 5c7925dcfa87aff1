"""The two training runs of the quickstart as command lines of `slime train`, and the files that they read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slime.quickstart.model import SHAPES, ModelShape, save_model
from slime.quickstart.tasks import Task
from slime.quickstart.tokenizer import train_tokenizer

SFT_STEPS = 180
SFT_STEPS_PER_ROLLOUT = 20
SFT_BATCH = 64
GRPO_ROLLOUTS = 60
PROMPTS_PER_ROLLOUT = 32
SAMPLES_PER_PROMPT = 8
HELD_OUT_PROBLEMS = 256
TOKENIZER_PROBLEMS = 2000
MAX_RESPONSE_TOKENS = 32
TOKENS_PER_MICRO_BATCH = 4096

SAMPLED, GREEDY = "held-out", "held-out-greedy"
"""The held-out problems are evaluated at temperature 1, as in training, and greedily."""


@dataclass(frozen=True)
class Paths:
    """Where the quickstart keeps its things."""

    root: Path

    @property
    def demonstrations(self) -> Path:
        return self.root / "data" / "demonstrations.jsonl"

    @property
    def prompts(self) -> Path:
        return self.root / "data" / "prompts.jsonl"

    @property
    def held_out(self) -> Path:
        return self.root / "data" / "held-out.jsonl"

    @property
    def eval_config(self) -> Path:
        return self.root / "data" / "eval.yaml"

    @property
    def random_model(self) -> Path:
        return self.root / "model-random"

    @property
    def sft_model(self) -> Path:
        return self.root / "model-sft"

    @property
    def rl_model(self) -> Path:
        return self.root / "model-rl"

    @property
    def sft_run(self) -> Path:
        return self.root / "sft"

    @property
    def grpo_run(self) -> Path:
        return self.root / "grpo"

    @property
    def report(self) -> Path:
        return self.root / "report.html"


@dataclass(frozen=True)
class Recipe:
    """What a user may change about the quickstart."""

    seed: int
    rollouts: int = GRPO_ROLLOUTS
    sft_steps: int = SFT_STEPS
    disaggregate: bool = False
    device: str = "cpu"
    train_backend: str = "fsdp"
    model: str = "tiny"
    extra: tuple[str, ...] = ()
    """Flags added to both training commands."""

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.model]

    @property
    def eval_interval(self) -> int:
        """About eight evaluations on the way, the last one after the last rollout."""
        return next(n for n in range(max(1, self.rollouts // 8), self.rollouts + 1) if self.rollouts % n == 0)


def write_inputs(recipe: Recipe, task: Task, paths: Paths) -> int:
    """Data, tokenizer and random model; returns the model's number of parameters."""
    paths.held_out.parent.mkdir(parents=True, exist_ok=True)
    demonstrations = list(task.problems(task.train, recipe.sft_steps * SFT_BATCH, "demonstrations"))
    prompts = task.problems(task.train, recipe.rollouts * PROMPTS_PER_ROLLOUT, "prompts")
    held_out = task.problems(task.held_out, HELD_OUT_PROBLEMS, "held-out")
    _write_jsonl(paths.demonstrations, (problem.demonstration_row() for problem in demonstrations))
    _write_jsonl(paths.prompts, (problem.prompt_row() for problem in prompts))
    _write_jsonl(paths.held_out, (problem.prompt_row() for problem in held_out))
    paths.eval_config.write_text(
        "defaults:\n  input_key: messages\n  label_key: label\n"
        f"datasets:\n  - name: {SAMPLED}\n    path: {paths.held_out}\n    temperature: 1.0\n"
        f"  - name: {GREEDY}\n    path: {paths.held_out}\n    temperature: 0.0\n"
    )
    texts = ["user\nassistant\n"]
    for problem in demonstrations[:TOKENIZER_PROBLEMS]:
        texts += [problem.question, problem.demonstration]
    return save_model(train_tokenizer(texts), paths.random_model, recipe.seed, recipe.shape)


def sft_flags(recipe: Recipe, paths: Paths) -> list[str]:
    """SFT on the demonstrations, each seen once."""
    steps = min(SFT_STEPS_PER_ROLLOUT, recipe.sft_steps)
    return _command(
        recipe,
        {
            "--hf-checkpoint": paths.random_model,
            "--prompt-data": paths.demonstrations,
            "--input-key": "messages",
            "--rollout-function-path": "slime.rollout.sft_rollout.generate_rollout",
            "--loss-type": "sft_loss",
            "--disable-compute-advantages-and-returns": None,
            "--debug-train-only": None,
            "--num-rollout": recipe.sft_steps // steps,
            "--rollout-batch-size": steps * SFT_BATCH,
            "--global-batch-size": SFT_BATCH,
            "--lr": recipe.shape.sft_lr,
            "--lr-warmup-iters": min(20, recipe.sft_steps // 2),
            "--save": paths.sft_run / "checkpoints",
            "--no-save-optim": None,
            "--save-hf": paths.sft_model,
            "--run-dir": paths.sft_run,
        },
    )


def grpo_flags(recipe: Recipe, paths: Paths) -> list[str]:
    """GRPO on problems without solutions; the reward is 1 for the right answer, else 0."""
    layout = {"--rollout-num-gpus": 2} if recipe.disaggregate else {"--colocate": None}
    return _command(
        recipe,
        {
            **layout,
            "--hf-checkpoint": paths.sft_model,
            "--ref-load": paths.sft_model,
            "--use-kl-loss": None,
            "--kl-loss-coef": 0.001,
            "--kl-loss-type": "low_var_kl",
            "--prompt-data": paths.prompts,
            "--input-key": "messages",
            "--label-key": "label",
            "--apply-chat-template": None,
            "--rm-type": "math",
            "--advantage-estimator": "grpo",
            "--num-rollout": recipe.rollouts,
            "--rollout-batch-size": PROMPTS_PER_ROLLOUT,
            "--n-samples-per-prompt": SAMPLES_PER_PROMPT,
            "--global-batch-size": PROMPTS_PER_ROLLOUT * SAMPLES_PER_PROMPT,
            "--rollout-temperature": 1.0,
            "--rollout-seed": recipe.seed,
            "--eval-config": paths.eval_config,
            "--eval-interval": recipe.eval_interval,
            "--lr": recipe.shape.grpo_lr,
            "--lr-warmup-iters": 3,
            "--save": paths.grpo_run / "checkpoints",
            "--save-hf": paths.rl_model,
            "--run-dir": paths.grpo_run,
        },
    )


def _trainer_ranks(recipe: Recipe) -> dict[str, object]:
    """Trainer processes: one; with Megatron on CPU two that share every layer, to show its parallelism."""
    if recipe.train_backend == "fsdp":
        return {"--actor-num-gpus-per-node": 1}
    padding = {"--make-vocab-size-divisible-by": 8, "--data-pad-size-multiplier": 8}
    if recipe.device == "cuda":
        return {"--actor-num-gpus-per-node": 1, **padding}
    parallel = {"--actor-num-gpus-per-node": 2, "--tensor-model-parallel-size": 2, "--sequence-parallel": None}
    return {**parallel, **padding}


def _command(recipe: Recipe, flags: dict[str, object]) -> list[str]:
    common = {
        "--train-backend": recipe.train_backend,
        "--device": recipe.device,
        **_trainer_ranks(recipe),
        "--use-dynamic-batch-size": None,
        "--max-tokens-per-gpu": TOKENS_PER_MICRO_BATCH,
        "--rollout-max-response-len": MAX_RESPONSE_TOKENS,
        "--adam-beta2": 0.98,
        "--seed": recipe.seed,
    }
    words = [str(word) for flag in (common | flags).items() for word in flag if word is not None]
    return [*words, *recipe.extra]


def _write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
