"""TRL's side of grpo_cpu.py: run GRPOTrainer for some steps and write the seconds of each as JSON.

Runs in an environment that has TRL; imports nothing of slime.
"""

import argparse
import json
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Reward:
    """Number of distinct words; remembers the response lengths."""

    __name__ = "distinct_words"

    def __init__(self):
        self.lengths = []

    def __call__(self, completions, completion_ids, **kwargs):
        self.lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return [float(len(set(text.split()))) for text in completions]


class StepClock(TrainerCallback):
    """Wall-clock seconds and sample counts of each optimizer step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.started)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts-per-step", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    with open(args.prompts) as f:
        rows = [{"prompt": json.loads(line)["input"]} for line in f]
    config = GRPOConfig(
        output_dir=args.out + ".trl",
        per_device_train_batch_size=args.prompts_per_step * args.group_size,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        max_steps=args.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=args.seed,
    )
    clock, reward = StepClock(), Reward()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    trainer.train()
    with open(args.out, "w") as f:
        json.dump({"step_seconds": clock.seconds, "mean_response_length": reward.lengths}, f)


if __name__ == "__main__":
    main()
