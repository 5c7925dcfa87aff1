"""Advantages, losses, KL, learning-rate schedule."""

from __future__ import annotations

import importlib.util
import logging
import re
from argparse import Namespace

from slime.arguments.problems import Problems
from slime.arguments.validation.checkpoints import check_iteration, is_torch_dist
from slime.arguments.validation.model import check_weights, read_hf_config, vocabulary_of

logger = logging.getLogger(__name__)

TEACHER_HOOK = "slime.rollout.teacher.teacher_log_probs"
_GROUP_RELATIVE = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_WITHOUT_KL = ("grpo", "gspo", "cispo", "on_policy_distillation")


def complete(args: Namespace, problems: Problems) -> None:
    """eps_clip_high, std normalisation, use_critic; contradictions between terms of the loss."""
    args.use_critic = args.advantage_estimator == "ppo"
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.loss_type == "sft_loss":
        args.compute_advantages_and_returns = False
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
        if (
            args.loss_type == "policy_loss"
            and args.advantage_estimator in _GROUP_RELATIVE
            and args.rewards_normalization
            and not args.debug_rollout_only
            and not problems.concern("--n-samples-per-prompt")
        ):
            logger.warning(
                "--n-samples-per-prompt 1 with --advantage-estimator %s: every reward equals its group's mean, so all "
                "advantages are 0; use more samples per prompt, or --disable-rewards-normalization",
                args.advantage_estimator,
            )
    _check_custom_loss(args, problems)
    _check_kl(args, problems)
    _check_schedule(args, problems)
    _complete_distillation(args, problems)
    _check_copies(args, problems)
    _complete_lora(args, problems)
    _check_optimizer(args, problems)
    if args.advantage_estimator.startswith("reinforce_plus_plus") and not args.normalize_advantages:
        problems.add(
            "--advantage-estimator",
            args.advantage_estimator,
            "requires --normalize-advantages",
            "add --normalize-advantages",
        )
    if args.use_rollout_logprobs and args.use_tis:
        problems.add("--use-rollout-logprobs", None, "excludes --use-tis", "give one of the two")
    _check_advantages(args, problems)
    if args.eps_clip_high < args.eps_clip and not problems.concern("--eps-clip", "--eps-clip-high"):
        problems.add(
            "--eps-clip-high",
            args.eps_clip_high,
            f"must be at least --eps-clip {args.eps_clip}",
            "raise it, or leave it out",
        )


def _check_custom_loss(args: Namespace, problems: Problems) -> None:
    if args.use_routing_replay and args.loss_type == "sft_loss":
        problems.add("--use-routing-replay", None, "has no log-prob pass to record in with --loss-type sft_loss")
    if args.loss_type == "custom_loss" and args.custom_loss_function_path is None:
        problems.add("--loss-type", "custom_loss", "needs --custom-loss-function-path", "add it")
    if args.loss_type != "custom_loss" and args.custom_loss_function_path is not None:
        problems.add(
            "--custom-loss-function-path",
            args.custom_loss_function_path,
            f"has no effect with --loss-type {args.loss_type}",
            "add --loss-type custom_loss",
        )
    if args.loss_type == "custom_loss" and args.context_parallel_size > 1:
        problems.add(
            "--loss-type",
            "custom_loss",
            "gets the logits of whole rows, which no rank has under --context-parallel-size",
            "use --context-parallel-size 1",
        )
    if args.custom_advantage_function_path is not None and not args.compute_advantages_and_returns:
        problems.add(
            "--custom-advantage-function-path",
            args.custom_advantage_function_path,
            "has no effect when no advantages are computed",
            "leave out --disable-compute-advantages-and-returns and --loss-type sft_loss",
        )


def _check_advantages(args: Namespace, problems: Problems) -> None:
    sources = (args.rollout_data_postprocess_path, args.custom_convert_samples_to_train_data_path)
    if args.loss_type == "policy_loss" and not args.compute_advantages_and_returns and not any(sources):
        problems.add(
            "--disable-compute-advantages-and-returns",
            None,
            "leaves --loss-type policy_loss without advantages",
            "leave it out, or set advantages in --rollout-data-postprocess-path",
        )
    if args.use_opd and args.advantage_estimator == "on_policy_distillation":
        problems.add(
            "--use-opd",
            None,
            "counts the teacher twice with --advantage-estimator on_policy_distillation",
            "leave it out, or choose another estimator",
        )
    if args.eps_clip_c is not None and args.advantage_estimator == "cispo":
        problems.add(
            "--eps-clip-c",
            args.eps_clip_c,
            "has no effect with --advantage-estimator cispo, which clips the weight of its gradient",
            "leave it out",
        )


def _check_kl(args: Namespace, problems: Problems) -> None:
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        problems.add(
            "--kl-coef",
            args.kl_coef,
            f"excludes --kl-loss-coef {args.kl_loss_coef}: KL counts in the reward or in the loss",
            "set one of them to 0",
        )
    for flag, given in (("--kl-loss-coef", args.kl_loss_coef != 0), ("--use-unbiased-kl", args.use_unbiased_kl)):
        if given and not args.use_kl_loss:
            value = args.kl_loss_coef if flag == "--kl-loss-coef" else None
            problems.add(flag, value, "has no effect without --use-kl-loss", "add --use-kl-loss")
    if args.kl_coef != 0 and args.advantage_estimator in _WITHOUT_KL and args.custom_advantage_function_path is None:
        logger.warning(
            "--kl-coef %s changes nothing with --advantage-estimator %s, whose advantages contain no KL (rollout/kl "
            "is logged all the same): use --use-kl-loss with --kl-loss-coef for a penalty",
            args.kl_coef,
            args.advantage_estimator,
        )


def _complete_distillation(args: Namespace, problems: Problems) -> None:
    """opd_type; the teacher's directory and vocabulary."""
    wanted = args.use_opd or args.advantage_estimator == "on_policy_distillation"
    if not wanted:
        given = {
            "--opd-type": args.opd_type,
            "--opd-teacher-load": args.opd_teacher_load,
            "--opd-teacher-ckpt-step": args.opd_teacher_ckpt_step,
            "--opd-teacher-url": args.opd_teacher_url,
        }
        for flag, value in given.items():
            if value is not None:
                problems.add(flag, value, "has no effect without --use-opd", "add --use-opd")
        return
    if args.opd_type is None:
        args.opd_type = "trainer" if args.opd_teacher_load is not None else "sglang"
    if args.opd_type == "sglang" and args.opd_teacher_load is not None:
        problems.add("--opd-type", "sglang", "excludes --opd-teacher-load", "use --opd-type trainer")
    if args.opd_teacher_load is None and args.opd_teacher_ckpt_step is not None:
        problems.add(
            "--opd-teacher-ckpt-step", args.opd_teacher_ckpt_step, "has no effect without --opd-teacher-load", "add it"
        )
    if args.opd_teacher_url is not None:
        _complete_remote_teacher(args, problems)
    if args.opd_type != "trainer" or args.debug_rollout_only:
        return
    if args.opd_teacher_load is None:
        problems.add("--opd-type", "trainer", "needs --opd-teacher-load", "give the teacher's Hugging Face directory")
        return
    path, step = args.opd_teacher_load, args.opd_teacher_ckpt_step
    if args.train_backend == "megatron" and is_torch_dist(path):
        check_iteration("--opd-teacher-ckpt-step", step, "--opd-teacher-load", path, problems)
        return
    if step is not None:
        rule = f"--opd-teacher-load {path} holds no torch_dist checkpoints of --train-backend megatron"
        problems.add("--opd-teacher-ckpt-step", step, rule, "leave it out")
    if _check_vocabulary(args, "--opd-teacher-load", path, path, problems):
        check_weights(path, "--opd-teacher-load", problems)


def _check_vocabulary(args: Namespace, flag: str, value: str, path: str, problems: Problems) -> bool:
    """Whether there is a teacher at `path`; its vocabulary must be the policy's."""
    teacher = read_hf_config(path, flag, problems)
    if teacher is not None and args.hf_checkpoint is not None and not problems.concern("--hf-checkpoint"):
        policy = read_hf_config(args.hf_checkpoint, "--hf-checkpoint", problems) or {}
        theirs, ours = (vocabulary_of(config) for config in (teacher, policy))
        if theirs is not None and ours is not None and theirs != ours:
            problems.add(
                flag,
                value,
                f"its vocabulary of {theirs} is not the {ours} of --hf-checkpoint: log-probs of the same token ids "
                "must mean the same",
                "choose a teacher of the same model family",
            )
    return teacher is not None


def _complete_lora(args: Namespace, problems: Problems) -> None:
    if args.lora_rank is None:
        for flag, value in (("--lora-alpha", args.lora_alpha), ("--lora-exclude-modules", args.lora_exclude_modules)):
            if value is not None:
                problems.add(flag, value, "has no effect without --lora-rank", "add --lora-rank")
        if args.lora_sync != "merged":
            problems.add("--lora-sync", args.lora_sync, "has no effect without --lora-rank", "add --lora-rank")
        return
    if args.lora_sync == "adapter":
        _check_adapter_sync(args, problems)
    if args.lora_alpha is None:
        args.lora_alpha = 2.0 * args.lora_rank
    if importlib.util.find_spec("peft") is None:
        problems.add("--lora-rank", args.lora_rank, "needs the package peft", "pip install 'slime[lora]'")
    if args.true_on_policy_mode:
        problems.add(
            "--lora-rank",
            args.lora_rank,
            "excludes --true-on-policy-mode: engines have merged weights, the trainer adapters beside them",
            "leave one of the two out",
        )


def _check_adapter_sync(args: Namespace, problems: Problems) -> None:
    asked = vars(args)
    for broken, rule, fix in (
        (args.rollout_engine != "sglang", "needs engines that add adapters themselves", "use --rollout-engine sglang"),
        (args.rollout_external, "excludes --rollout-external", "use merged"),
        (args.update_weight_transport == "disk", "excludes --update-weight-transport disk", "leave that out"),
        (args.check_weight_update_equal, "excludes --check-weight-update-equal", "leave that out"),
        (
            args.update_weights_pause_mode not in (None, "abort"),
            f"excludes --update-weights-pause-mode {args.update_weights_pause_mode}: adapters in use stay",
            "use abort",
        ),
        ((asked.get("sglang_dp_size") or 1) > 1, "excludes --sglang-dp-size", "use more engines"),
    ):
        if broken:
            problems.add("--lora-sync", "adapter", rule, fix)


def _check_optimizer(args: Namespace, problems: Problems) -> None:
    if args.optimizer == "cpu_adam" and args.fsdp_cpu_offload:
        problems.add(
            "--optimizer",
            "cpu_adam",
            "has no effect with --fsdp-cpu-offload, which keeps parameters and moments in host memory",
            "leave one of the two out",
        )


def _complete_remote_teacher(args: Namespace, problems: Problems) -> None:
    """The hook that asks the teacher comes first, so that others see its log-probs."""
    url = args.opd_teacher_url
    if args.opd_type == "trainer":
        problems.add("--opd-teacher-url", url, "excludes a teacher in the trainer", "leave out --opd-teacher-load")
    model = next((model for model in args.served_models if model.name == url and not model.update_weights), None)
    if model is not None:
        _check_vocabulary(args, "--opd-teacher-url", url, model.model_path, problems)
    elif not url.startswith(("http://", "https://")) and not problems.concern("--sglang-config"):
        rule = "must start with http:// or https://, or be the name of a frozen model of --sglang-config"
        problems.add("--opd-teacher-url", url, rule)
    if args.rollout_temperature != 1:
        problems.add(
            "--opd-teacher-url",
            url,
            f"gives log-probs of temperature 1, not of --rollout-temperature {args.rollout_temperature}",
            "use --rollout-temperature 1, or a teacher in the trainer (--opd-teacher-load)",
        )
    if TEACHER_HOOK not in args.rollout_sample_hook_path:
        args.rollout_sample_hook_path = [TEACHER_HOOK, *args.rollout_sample_hook_path]


def _check_copies(args: Namespace, problems: Problems) -> None:
    if args.ref_update_interval is not None and not (args.use_kl_loss or args.kl_coef != 0):
        problems.add(
            "--ref-update-interval",
            args.ref_update_interval,
            "has no effect without a reference model",
            "add --use-kl-loss or --kl-coef",
        )
    if args.keep_old_actor and args.use_rollout_logprobs:
        problems.add(
            "--keep-old-actor",
            None,
            "excludes --use-rollout-logprobs: the old policy's log-probs are computed, or the engine's",
            "give one of the two",
        )
    for flag, expressions in (
        ("--only-train-params-name-list", args.only_train_params_name_list),
        ("--freeze-params-name-list", args.freeze_params_name_list),
    ):
        for expression in expressions or []:
            try:
                re.compile(expression)
            except re.error as error:
                problems.add(flag, expression, f"is no regular expression ({error})")


def _check_schedule(args: Namespace, problems: Problems) -> None:
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        problems.add(
            "--lr-warmup-fraction", args.lr_warmup_fraction, "excludes --lr-warmup-iters", "give one of the two"
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        problems.add("--lr-decay-style", "WSD", "needs --lr-wsd-decay-iters", "add the steps of the final decay")
    if args.lr_decay_style != "WSD" and args.lr_wsd_decay_iters is not None:
        problems.add(
            "--lr-wsd-decay-iters", args.lr_wsd_decay_iters, "has no effect without --lr-decay-style WSD", "add it"
        )
    if args.min_lr > args.lr:
        problems.add("--min-lr", args.min_lr, f"must not exceed --lr {args.lr}")
