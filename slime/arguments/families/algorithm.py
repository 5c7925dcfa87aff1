"""Advantages and losses."""

from slime.arguments.flag import STORE_FALSE, STORE_TRUE, Family, Flag, function_path, integer, number, text

ESTIMATORS = (
    "grpo",
    "gspo",
    "cispo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
    "on_policy_distillation",
)

FAMILY = Family(
    "Algorithm",
    "Advantage estimators, policy losses, KL terms and their coefficients.",
    (
        Flag(
            "--advantage-estimator",
            text,
            "grpo",
            "Algorithm.",
            choices=ESTIMATORS,
            choice_aliases={
                "reinforce++": "reinforce_plus_plus",
                "reinforce++-baseline": "reinforce_plus_plus_baseline",
                "reinforce++_baseline": "reinforce_plus_plus_baseline",
            },
        ),
        Flag(
            "--loss-type",
            text,
            "policy_loss",
            "Which loss.",
            choices=("policy_loss", "sft_loss", "custom_loss"),
        ),
        Flag(
            "--custom-loss-function-path",
            function_path,
            help="fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics), for --loss-type custom_loss.",
        ),
        Flag(
            "--custom-advantage-function-path",
            function_path,
            help="fn(args, rollout_data): sets advantages and returns.",
        ),
        Flag("--eps-clip", number, 0.2, "Clip range of the probability ratio; the lower one when both are given."),
        Flag("--eps-clip-high", number, help="Upper clip range. Default: --eps-clip."),
        Flag("--eps-clip-c", number, help="Constant of the dual clip, above 1."),
        Flag("--kl-coef", number, 0.0, "Weight of KL in the reward; excludes --kl-loss-coef."),
        Flag("--use-kl-loss", action=STORE_TRUE, help="Add a KL term to the loss; loads the reference model."),
        Flag("--kl-loss-coef", number, 0.0, "Weight of the KL term of the loss."),
        Flag("--kl-loss-type", text, "k1", "KL estimator.", choices=("k1", "k2", "k3", "low_var_kl")),
        Flag("--use-unbiased-kl", action=STORE_TRUE, help="Multiply KL by the probability ratio (DeepSeek-V3.2)."),
        Flag("--entropy-coef", number, 0.0, "Weight of the entropy bonus."),
        Flag("--gamma", number, 1.0, "Discount."),
        Flag("--lambd", number, 1.0, "Lambda of GAE."),
        Flag("--normalize-advantages", action=STORE_TRUE, help="Whiten advantages over all samples of a rollout."),
        Flag(
            "--disable-grpo-std-normalization",
            action=STORE_FALSE,
            dest="grpo_std_normalization",
            help="Centre rewards in their group without dividing by their deviation (Dr.GRPO).",
        ),
        Flag(
            "--disable-rewards-normalization",
            action=STORE_FALSE,
            dest="rewards_normalization",
            help="Use rewards as they are.",
        ),
        Flag(
            "--disable-compute-advantages-and-returns",
            action=STORE_FALSE,
            dest="compute_advantages_and_returns",
            help="No advantages (SFT, custom losses).",
        ),
        Flag(
            "--moe-aux-loss-coeff",
            number,
            0.0,
            "Weight of the load-balancing loss of mixture-of-experts models, beside the policy's loss.",
        ),
        Flag("--calculate-per-token-loss", action=STORE_TRUE, help="Mean over tokens instead of samples."),
        Flag("--use-rollout-logprobs", action=STORE_TRUE, help="The engine's log-probs are the old policy's."),
        Flag("--use-rollout-entropy", action=STORE_TRUE, help="Compute entropy in the log-prob pass, too."),
        Flag(
            "--ref-update-interval",
            integer,
            help="Copy the policy into the reference model every N rollouts.",
        ),
        Flag(
            "--keep-old-actor",
            action=STORE_TRUE,
            help="Compute old log-probs with the weights that generated the samples (asynchronous loop: the engines' "
            "weights are older than the trainer's).",
        ),
        Flag("--value-clip", number, 0.2, "Clip range of values."),
        Flag("--num-critic-only-steps", integer, 0, "Rollouts that only train the critic."),
        Flag("--critic-train-only", action=STORE_TRUE, help="Only train the critic."),
        Flag("--critic-lr", number, help="Learning rate of the critic. Default: --lr."),
        Flag("--critic-lr-warmup-iters", integer, 0, "Warmup steps of the critic."),
        Flag(
            "--use-opd",
            action=STORE_TRUE,
            help="On-policy distillation: advantages lose opd-kl-coef x (policy - teacher log-prob), whatever the "
            "estimator.",
        ),
        Flag(
            "--opd-type",
            text,
            help="Where the teacher's log-probs come from: trainer runs --opd-teacher-load itself; sglang means that "
            "the rollout sets Sample.teacher_log_probs, by --opd-teacher-url or a function of yours. Default: trainer "
            "with --opd-teacher-load.",
            choices=("trainer", "sglang"),
            choice_aliases={"megatron": "trainer"},
        ),
        Flag("--opd-kl-coef", number, 1.0, "Weight of distillation."),
        Flag(
            "--opd-teacher-url",
            text,
            help="URL of an engine with the teacher, which scores the responses, or "
            "the name of a frozen model of --sglang-config.",
        ),
        Flag(
            "--opd-teacher-load",
            text,
            help="Hugging Face directory of the teacher, with the same vocabulary; with Megatron also the torch_dist "
            "checkpoints of a model with the policy's architecture.",
        ),
        Flag("--opd-teacher-ckpt-step", integer, help="Which of them. Default: the latest."),
        Flag(
            "--use-routing-replay",
            action=STORE_TRUE,
            help="Record the routing of expert layers in the log-prob pass and replay it in training.",
        ),
        Flag(
            "--use-rollout-routing-replay",
            action=STORE_TRUE,
            help="Replay the engine's routing of expert layers in the log-prob pass and in training.",
        ),
    ),
)
