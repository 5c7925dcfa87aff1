"""The trained model and its trainer."""

from slime.arguments import pending
from slime.arguments.flag import STORE_TRUE, Family, Flag, integer, number, text

_OTHER_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa", "eager")

FAMILY = Family(
    "Model and trainer",
    "Which checkpoint is trained, by which backend, in which precision.",
    (
        Flag(
            "--hf-checkpoint",
            text,
            help="Hugging Face directory: tokenizer, architecture, engine weights and (fsdp) the weights that are "
            "trained. Required.",
        ),
        Flag(
            "--train-backend",
            text,
            help="Trainer. Default: megatron on GPUs where megatron-core is installed, knows the model and has what "
            "other flags ask for; otherwise fsdp.",
            choices=("fsdp", "megatron"),
        ),
        Flag("--trust-remote-code", action=STORE_TRUE, help="Run Python code that comes with the checkpoint."),
        Flag(
            "--dtype",
            text,
            help="Precision of computation. Default: float32 on cpu, bfloat16 on cuda.",
            choices=("float32", "bfloat16", "float16"),
            choice_aliases={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"},
            pending_choices={"float16": pending.FP16},
        ),
        Flag("--bf16", action=STORE_TRUE, help="Short for --dtype bfloat16."),
        Flag("--fp16", action=STORE_TRUE, help="Short for --dtype float16.", pending=pending.FP16),
        Flag(
            "--attn-implementation",
            text,
            "auto",
            "Attention of the trainer: slime_varlen is packed flash kernels; slime_cudnn hands sequences of 4096 "
            "tokens and more to cuDNN; auto does so on Hopper and newer GPUs, unless --deterministic-mode.",
            choices=("auto", "slime_varlen", "slime_cudnn", *_OTHER_ATTENTION),
            pending_choices=dict.fromkeys(_OTHER_ATTENTION, pending.OTHER_ATTENTION),
        ),
        Flag(
            "--gradient-checkpointing",
            action=STORE_TRUE,
            help="Recompute activations layer by layer in the backward pass.",
        ),
        Flag(
            "--fsdp-cpu-offload",
            action=STORE_TRUE,
            help="Keep parameters, gradients and optimizer state in host memory.",
        ),
        Flag(
            "--fsdp-offload-activations",
            action=STORE_TRUE,
            help="Keep what the backward pass needs of each layer in host memory; with --gradient-checkpointing that "
            "is one hidden state per layer.",
        ),
        Flag(
            "--fsdp-reduce-grads-once",
            action=STORE_TRUE,
            help="Reduce gradients over the trainers after the last micro-batch of a step only: less traffic, but "
            "every trainer holds all gradients in fp32.",
        ),
        Flag(
            "--fsdp-compile",
            text,
            help="Run the decoder layers of the fsdp trainer through torch.compile with this backend: inductor writes "
            "kernels, aot_eager only traces and needs no compiler. Default: not compiled.",
            choices=("inductor", "aot_eager"),
        ),
        Flag(
            "--fsdp-state-dict-cpu-offload",
            action=STORE_TRUE,
            help="Move state dicts to host memory while saving.",
            pending="checkpoints are written from the training device",
        ),
        Flag(
            "--context-parallel-size",
            integer,
            1,
            "Ranks that share each sequence; they must divide the trainer GPUs and share the attention heads.",
        ),
        Flag("--deterministic-mode", action=STORE_TRUE, help="Deterministic kernels: equal runs, bit for bit."),
        Flag("--seed", integer, 1234, "Seed of the trainer; engine i uses seed + i."),
        Flag(
            "--log-probs-chunk-size",
            integer,
            -1,
            "Rows per chunk in the log-prob computation; -1 lets slime choose.",
        ),
        Flag(
            "--true-on-policy-mode",
            action=STORE_TRUE,
            help="Batch-invariant operations in trainer and engine: their log-probs are equal bit for bit, which "
            "every step checks. Dense models on the embedded engine; slower.",
        ),
        Flag(
            "--only-train-params-name-list",
            text,
            nargs="*",
            help="Regular expressions of the parameters to train, found anywhere in their names.",
        ),
        Flag(
            "--freeze-params-name-list",
            text,
            nargs="*",
            help="Regular expressions of parameters to freeze.",
        ),
        Flag(
            "--lora-rank",
            integer,
            help="Train low-rank adapters of this rank (LoRA, by peft) instead of the weights. Checkpoints hold the "
            "adapters alone; engines and --save-hf get merged weights.",
        ),
        Flag("--lora-alpha", number, help="Adapters are scaled by this / --lora-rank. Default: 2 x --lora-rank."),
        Flag(
            "--lora-target-modules",
            text,
            ["all-linear"],
            "Modules that get adapters, by the ends of their names; all-linear: every linear layer but the output.",
            nargs="+",
        ),
        Flag(
            "--lora-sync",
            text,
            "merged",
            "What engines get of adapters: merged into the weights, or the adapters alone, which SGLang adds itself. "
            "The second sends a few MB per update and costs time per token.",
            choices=("merged", "adapter"),
        ),
        Flag("--lora-exclude-modules", text, nargs="*", help="Modules without adapters among the target modules."),
    ),
)
