"""Optimizer and learning-rate schedule."""

from slime.arguments import pending
from slime.arguments.flag import STORE_TRUE, Family, Flag, integer, number, text

FAMILY = Family(
    "Optimizer",
    "Adam and its learning-rate schedule. Iterations are optimizer steps.",
    (
        Flag(
            "--optimizer",
            text,
            "adam",
            "Optimizer (AdamW: decoupled weight decay); cpu_adam keeps its moments in host memory and steps there.",
            choices=("adam", "cpu_adam", "sgd"),
            pending_choices={"sgd": pending.OPTIMIZER},
        ),
        Flag("--lr", number, 1e-6, "Learning rate."),
        Flag("--min-lr", number, 0.0, "Learning rate at the end of the decay."),
        Flag(
            "--lr-decay-style",
            text,
            "constant",
            "Schedule after the warmup.",
            choices=("constant", "linear", "cosine", "WSD"),
            choice_aliases={"wsd": "WSD"},
        ),
        Flag("--lr-decay-iters", integer, help="Steps over which lr decays. Default: all steps of the run."),
        Flag("--lr-warmup-iters", integer, 0, "Steps of linear warmup."),
        Flag("--lr-warmup-fraction", number, help="Warmup as a fraction of lr-decay-iters, instead of a count."),
        Flag("--lr-warmup-init", number, 0.0, "Learning rate at the start of the warmup."),
        Flag("--lr-wsd-decay-iters", integer, help="Steps of the final decay of WSD."),
        Flag(
            "--lr-wsd-decay-style",
            text,
            "exponential",
            "Shape of the final decay of WSD.",
            choices=("exponential", "linear", "cosine", "minus_sqrt"),
        ),
        Flag("--weight-decay", number, 0.01, "Decoupled weight decay."),
        Flag("--adam-beta1", number, 0.9, "Decay of the first moment."),
        Flag("--adam-beta2", number, 0.999, "Decay of the second moment."),
        Flag("--adam-eps", number, 1e-8, "Term added to the denominator."),
        Flag("--clip-grad", number, 1.0, "Clip gradients to this global norm; 0 switches clipping off."),
        Flag(
            "--megatron-config-path",
            text,
            help="YAML of optimizer flags per role, `actor: {...}` and `critic: {...}`; replaces the critic's flags.",
        ),
        Flag(
            "--reset-optimizer-states",
            action=STORE_TRUE,
            help="Clear the optimizer's state at each rollout.",
        ),
        Flag(
            "--use-stateless-adam",
            action=STORE_TRUE,
            help="Adam without moments across steps.",
            pending=pending.OPTIMIZER,
        ),
    ),
)
