"""Tiny models for the examples: the quickstart's, and ones that have seen demonstrations of another format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.common.launch import TINY, slime

SFT_BATCH = 64


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def quickstart_task(work: Path, sft_steps: int, rollouts: int = 40, seed: int = 0):
    """The quickstart's word problems and its model after SFT; returns the quickstart's `Paths` below `work`."""
    from slime.quickstart.recipe import Paths, Recipe, sft_flags, write_inputs
    from slime.quickstart.tasks import Task

    paths = Paths(work / f"quickstart-{sft_steps}")
    if not paths.sft_model.exists():
        recipe = Recipe(seed=seed, rollouts=rollouts, sft_steps=sft_steps)
        write_inputs(recipe, Task.make(seed), paths)
        slime("train", {}, sft_flags(recipe, paths))
    return paths


def model_from_demonstrations(
    work: Path, demonstrations: list[list[dict[str, str]]], context_length: int = 256, seed: int = 0
) -> Path:
    """A tokenizer trained on conversations, and a tiny Qwen3 that has seen each of them once."""
    from slime.quickstart.model import SHAPES, save_model
    from slime.quickstart.tokenizer import train_tokenizer

    trained = work / f"model-{len(demonstrations)}"
    if trained.exists():
        return trained
    texts = ["user\nassistant\n", *(turn["content"] for messages in demonstrations for turn in messages)]
    shape = replace(SHAPES["tiny"], context_length=context_length)
    save_model(train_tokenizer(texts), work / "model-random", seed, shape)
    steps = len(demonstrations) // SFT_BATCH
    slime(
        "train",
        {
            **TINY,
            "--hf-checkpoint": work / "model-random",
            "--prompt-data": write_jsonl(work / "demonstrations.jsonl", ({"messages": m} for m in demonstrations)),
            "--input-key": "messages",
            "--rollout-function-path": "slime.rollout.sft_rollout.generate_rollout",
            "--loss-type": "sft_loss",
            "--disable-compute-advantages-and-returns": None,
            "--debug-train-only": None,
            "--num-rollout": 1,
            "--rollout-batch-size": steps * SFT_BATCH,
            "--global-batch-size": SFT_BATCH,
            "--lr": 4e-3,
            "--lr-warmup-iters": max(1, steps // 10),
            "--save": work / "sft-checkpoints",
            "--no-save-optim": None,
            "--save-hf": trained,
            "--run-dir": work / "sft",
        },
    )
    return trained
