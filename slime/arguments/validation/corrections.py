"""Corrections of the train/rollout mismatch."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.parser import BY_DEST
from slime.arguments.problems import Problems

_OF_POLICY_LOSS = ("use_tis", "get_mismatch_metrics", "use_opsm", "custom_pg_loss_reducer_function_path")
_OF_RL_LOSSES = ("use_kl_loss", "kl_coef", "entropy_coef", "eps_clip_c", "use_opd")
_OF_TIS = ("tis_clip", "tis_clip_low", "custom_tis_function_path")
_OF_MIS = ("mis_level", "mis_mode", "mis_upper_bound", "mis_lower_bound", "mis_veto_threshold")


def check(args: Namespace, problems: Problems) -> None:
    """Settings that nothing uses, and bounds in the wrong order."""
    if args.loss_type != "policy_loss":
        fix = "use --loss-type policy_loss, or leave it out"
        _unused(args, _OF_POLICY_LOSS, f"has no effect with --loss-type {args.loss_type}", fix, problems)
    if args.loss_type == "sft_loss":
        rule = "has no effect with --loss-type sft_loss, the likelihood alone"
        _unused(args, _OF_RL_LOSSES, rule, "use --loss-type policy_loss, or leave it out", problems)
    if not args.use_tis and not args.get_mismatch_metrics:
        _unused(args, _OF_TIS, "has no effect without --use-tis", "add --use-tis or --get-mismatch-metrics", problems)
    if args.custom_tis_function_path is None:
        fix = "add --use-tis --custom-tis-function-path slime.training.mis.mis_function"
        _unused(args, _OF_MIS, "has no effect without a correction that reads it", fix, problems)
    if not args.use_opsm:
        _unused(args, ("opsm_delta",), "has no effect without --use-opsm", "add --use-opsm", problems)
    for low, high in (("tis_clip_low", "tis_clip"), ("mis_lower_bound", "mis_upper_bound")):
        lower, upper = getattr(args, low), getattr(args, high)
        if lower > upper and not problems.concern(BY_DEST[low].name, BY_DEST[high].name):
            rule = f"must not exceed {BY_DEST[high].name} {upper}"
            problems.add(BY_DEST[low].name, lower, rule, "lower it, or raise the upper bound")

    if args.use_rollout_top_p_replay:
        _check_replay(args, problems)


def _check_replay(args: Namespace, problems: Problems) -> None:
    flag = "--use-rollout-top-p-replay"
    if args.rollout_top_p == 1 and args.rollout_top_k == -1:
        problems.add(flag, None, "has no effect without --rollout-top-p below 1 or --rollout-top-k", "add one of them")
    if args.rollout_engine == "sglang":
        _check_sglang_replay(args, flag, problems)
    if args.true_on_policy_mode:
        problems.add(flag, None, "is not possible with --true-on-policy-mode", "leave one of the two out")


def _check_sglang_replay(args: Namespace, flag: str, problems: Problems) -> None:
    """SGLang returns what it sampled among where top-k bounds how much that can be."""
    most = vars(args).get("sglang_sampling_mask_max_tokens")
    if args.rollout_top_k == -1:
        bound = f"of 2 to {most}" if most else "above 1"
        rule = "needs a bound on the tokens that SGLang returns with each step"
        problems.add(flag, None, rule, f"add a --rollout-top-k {bound}, or use --rollout-engine embedded")
    elif most and args.rollout_top_k > most:
        rule = f"with {flag} must not exceed --sglang-sampling-mask-max-tokens {most}"
        problems.add("--rollout-top-k", args.rollout_top_k, rule, "lower it, or raise that")
    if vars(args).get("sglang_speculative_algorithm"):
        rule = "is not possible with --sglang-speculative-algorithm: a draft token has no set that it was sampled from"
        problems.add(flag, None, rule, "leave one of the two out")


def _unused(args: Namespace, dests: tuple[str, ...], rule: str, fix: str, problems: Problems) -> None:
    for dest in dests:
        flag, value = BY_DEST[dest], getattr(args, dest)
        if value != flag.default and not problems.concern(flag.name):
            problems.add(flag.name, None if flag.is_bool else value, rule, fix)
