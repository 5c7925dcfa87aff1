"""What the run calls each user function with, compared with the parameters that its source gives it."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """Arguments of a call, by the names that messages use."""

    positional: str = ""
    keywords: str = ""
    """Always given."""
    optional: str = ""
    """Keywords that are given to a function that takes them."""
    forms: tuple[int, ...] = ()
    """Numbers of positional arguments that will do, where that is not only all of them."""

    def __str__(self) -> str:
        names = self.positional.split() + [f"{name}=..." for name in self.keywords.split()]
        return f"({', '.join(names)})"


_REWARD = Call("args sample", optional="evaluation")
_GENERATE = Call("args sample sampling_params", optional="evaluation")
_ROLLOUT = Call("args rollout_id data_source", optional="evaluation")
CALLS: dict[str, Call] = {
    "rollout-function": _ROLLOUT,
    "eval-function": _ROLLOUT,
    "custom-generate-function": _GENERATE,
    "custom-rm": _REWARD,
    "rollout-sample-hook": Call("args sample", optional="rollout_id evaluation"),
    "dynamic-sampling-filter": Call("args samples"),
    "buffer-filter": Call("args rollout_id buffer num_samples"),
    "rollout-sample-filter": Call("args groups"),
    "rollout-all-samples-process": Call("args groups data_source"),
    "custom-reward-post-process": Call("args samples"),
    "custom-convert-samples-to-train-data": Call("args samples"),
    "data-source": Call("args"),
    "custom-rollout-log-function": Call("rollout_id args samples extra_metrics rollout_time"),
    "custom-eval-rollout-log-function": Call("rollout_id args data extra_metrics"),
    "rollout-data-postprocess": Call("args rollout_id rollout_data", forms=(1, 2, 3)),
    "custom-advantage-function": Call("args rollout_data"),
    "custom-loss-function": Call("args batch logits sum_of_sample_mean"),
    "custom-tis-function": Call(
        keywords="args pg_loss train_log_probs rollout_log_probs loss_masks total_lengths response_lengths"
    ),
    "custom-pg-loss-reducer-function": Call("total_lengths response_lengths loss_masks calculate_per_token_loss"),
    "custom-megatron-init": Call("args"),
    "custom-model-provider": Call("pre_process post_process", keywords="vp_stage", optional="build config"),
    "custom-megatron-before-log-prob-hook": Call("args model store_prefix"),
    "custom-megatron-before-train-step-hook": Call("args rollout_id step_id model optimizer opt_param_scheduler"),
    "slime-router-middleware": Call("app", keywords="router"),
    "custom-update-weight-post-write": Call("args version_dir rollout_engines"),
}
"""By flag, without --, -path and -paths. Keys of an --eval-config that name functions have the same names."""


def call_of(flag: str) -> Call | None:
    """What the function of a flag (or of a key of an --eval-config) is called with."""
    name = flag.split()[0].removeprefix("--").replace("_", "-")
    return CALLS.get(name.removesuffix("-paths").removesuffix("-path"))


def definition_of(tree: ast.Module, name: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool] | None:
    """The function, or the constructor of the class (True), that a module's top level defines under a name.

    None where the source does not say what a call would meet: decorated, defined elsewhere or more than once.
    """
    found = [n for n in ast.walk(tree) if getattr(n, "name", None) == name and hasattr(n, "decorator_list")]
    if len(found) != 1 or found[0] not in tree.body or found[0].decorator_list:
        return None
    if not isinstance(found[0], ast.ClassDef):
        return found[0], False
    made = [n for n in found[0].body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return (made[0], True) if len(made) == 1 and not made[0].decorator_list else None


def fits(call: Call, function: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> bool:
    """Whether a call of one of its forms binds to the parameters (`bound`: the first is self)."""
    given = function.args
    positional = [a.arg for a in (*given.posonlyargs, *given.args)][int(bound) :]
    by_keyword = {a.arg for a in (*given.args, *given.kwonlyargs)}
    without_default = set(positional[: max(0, len(positional) - len(given.defaults))])
    without_default |= {a.arg for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is None}
    always, sometimes = set(call.keywords.split()), set(call.optional.split())
    for count in call.forms or (len(call.positional.split()),):
        names = set(positional[:count])
        room = given.vararg is not None or len(positional) >= count
        taken = given.kwarg is not None or always <= by_keyword
        if room and taken and not names & always and without_default - names <= always | sometimes:
            return True
    return False


def written(function: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> str:
    """`(args, sample)`: the parameters as the source has them, without self."""
    text = ast.unparse(function.args)
    return f"({text.partition(', ')[2] if bound else text})"
