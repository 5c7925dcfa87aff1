"""The Megatron trainer: how ranks are cut, what its flags say about the model, what it does not have yet."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.arguments.families.megatron import FAMILY, INSTALL_MEGATRON
from slime.arguments.parser import MEGATRON_FLAGS, resolve
from slime.arguments.problems import Problems
from slime.backends.megatron_utils.architecture import (
    Architecture,
    UnsupportedModelError,
    padded_vocab_size,
    read_architecture,
)
from slime.backends.megatron_utils.arguments import config_fields
from slime.backends.megatron_utils.fields import ARCHITECTURE, NEEDED, REFUSED
from slime.backends.megatron_utils.name_maps import KEPT
from slime.utils.checkpoint_files import is_hf_directory

logger = logging.getLogger(__name__)

# What the other trainer has and this one has not, with the values that ask for it.
_MISSING: dict[str, Callable[[Any], bool]] = {
    "fsdp_cpu_offload": bool,
    "fsdp_offload_activations": bool,
    "fsdp_reduce_grads_once": bool,
    "fsdp_compile": bool,
    "lora_rank": bool,
    "true_on_policy_mode": bool,
}

# Flags that describe the model -> what the checkpoint says. None where the checkpoint has no such thing.
DESCRIBED: dict[str, Callable[[Architecture], Any]] = {
    "num_layers": lambda a: a["num_layers"],
    "hidden_size": lambda a: a["hidden_size"],
    "ffn_hidden_size": lambda a: a["ffn_hidden_size"],
    "num_attention_heads": lambda a: a["num_attention_heads"],
    "num_query_groups": lambda a: a["num_query_groups"],
    "kv_channels": lambda a: a["kv_channels"],
    "normalization": lambda a: a["normalization"],
    "norm_epsilon": lambda a: a["layernorm_epsilon"],
    "rotary_base": lambda a: a.rope.theta,
    "rotary_percent": lambda a: a.rope.dim / a["kv_channels"],
    "vocab_size": lambda a: a.vocab_size,
    "num_experts": lambda a: a.get("num_moe_experts"),
    "moe_ffn_hidden_size": lambda a: a.get("moe_ffn_hidden_size"),
    "moe_shared_expert_intermediate_size": lambda a: a.get("moe_shared_expert_intermediate_size"),
    "moe_router_topk": lambda a: a.get("moe_router_topk"),
    "moe_router_num_groups": lambda a: a.get("moe_router_num_groups") or 1,
    "moe_router_group_topk": lambda a: a.get("moe_router_group_topk") or 1,
    "moe_router_topk_scaling_factor": lambda a: a.get("moe_router_topk_scaling_factor"),
    "moe_router_score_function": lambda a: a.get("moe_router_score_function"),
    "q_lora_rank": lambda a: a.get("q_lora_rank"),
    "kv_lora_rank": lambda a: a.get("kv_lora_rank"),
    "qk_head_dim": lambda a: a.get("qk_head_dim"),
    "qk_pos_emb_head_dim": lambda a: a.get("qk_pos_emb_head_dim"),
    "v_head_dim": lambda a: a.get("v_head_dim"),
    "mtp_num_layers": lambda a: a.mtp_layers or None,
}
MAX_BETA_BF16 = 0.98
"""A step changes a moment by (1 - beta) of its distance from the mean, and bf16 rounds less than 2^-8 of the moment
away: it stops up to 20 % from the mean."""
_ENDS = {
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
}
_COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
# Switches: given, they say that the model has this; left out, nothing.
SWITCHES: dict[str, tuple[str, Callable[[Architecture], bool]]] = {
    "swiglu": ("--swiglu", lambda a: a["gated_linear_unit"]),
    "group_query_attention": (
        "--group-query-attention",
        lambda a: a["num_query_groups"] != a["num_attention_heads"],
    ),
    "use_rotary_position_embeddings": ("--use-rotary-position-embeddings", lambda a: True),
    "add_qkv_bias": ("--add-qkv-bias", lambda a: a["add_qkv_bias"]),
    "qk_layernorm": ("--qk-layernorm", lambda a: a["qk_layernorm"]),
    "untie_embeddings_and_output_weights": ("--untie-embeddings-and-output-weights", lambda a: not a.tied),
    "multi_latent_attention": (
        "--multi-latent-attention",
        lambda a: bool(a.get("multi_latent_attention")),
    ),
    "moe_router_enable_expert_bias": (
        "--moe-router-enable-expert-bias",
        lambda a: bool(a.get("moe_router_enable_expert_bias")),
    ),
    "moe_router_pre_softmax": ("--moe-router-pre-softmax", lambda a: bool(a.get("moe_router_pre_softmax"))),
}


def choose(args: Namespace, problems: Problems) -> None:
    """train_backend: Megatron on GPUs where it is installed and can do what is asked."""
    if args.train_backend is None:
        lacks = any(asked(getattr(args, dest)) for dest, asked in _MISSING.items())
        usable = args.device == "cuda" and config_fields() and not lacks and _is_known(args.hf_checkpoint)
        args.train_backend = "megatron" if usable else "fsdp"


def _is_known(hf_checkpoint: str | None) -> bool:
    """Whether Megatron has the model; a directory that cannot be read is reported by others."""
    try:
        return hf_checkpoint is not None and bool(read_architecture(hf_checkpoint))
    except (UnsupportedModelError, OSError, ValueError, KeyError):
        return False


def complete(args: Namespace, problems: Problems) -> None:
    """Rules of --train-backend megatron; with another trainer its flags are refused."""
    if args.train_backend != "megatron":
        for flag in (*FAMILY.flags, *MEGATRON_FLAGS):
            value = getattr(args, flag.dest)
            if value != flag.default:
                shown = None if flag.is_bool else value
                rule = f"has no effect with --train-backend {args.train_backend}"
                problems.add(flag.name, shown, rule, "leave it out, or add --train-backend megatron")
        return
    if not config_fields():
        problems.add("--train-backend", "megatron", "megatron-core is not installed", INSTALL_MEGATRON)
    for dest, asked in _MISSING.items():
        value = getattr(args, dest)
        if asked(value):
            shown = None if isinstance(value, bool) else value
            problems.add(
                "--" + dest.replace("_", "-"),
                shown,
                "is not available yet with --train-backend megatron",
                "use --train-backend fsdp",
            )
    if args.gradient_checkpointing and args.recompute_granularity is None:
        args.recompute_granularity, args.recompute_method, args.recompute_num_layers = "full", "uniform", 1
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        logger.warning("--sequence-parallel has no effect with --tensor-model-parallel-size 1")
        args.sequence_parallel = False
    _check_recompute(args, problems)
    _check_moments(args, problems)
    _check_given(args, problems)
    if args.hf_checkpoint is None or problems.concern("--hf-checkpoint"):
        return
    try:
        architecture = read_architecture(args.hf_checkpoint)
    except UnsupportedModelError as error:
        problems.add("--hf-checkpoint", args.hf_checkpoint, str(error))
        return
    _check_described(args, architecture, problems)
    _complete_virtual_stages(args, architecture, problems)
    _check_drafts(args, architecture, problems)
    if not args.debug_rollout_only:
        _check_ranks(args, architecture, problems)


def _check_moments(args: Namespace, problems: Problems) -> None:
    """`--use-precision-aware-optimizer`: which moments may have fewer bits."""
    on_host = args.optimizer_cpu_offload or args.optimizer == "cpu_adam"
    moments = {
        "--exp-avg-dtype": (args.exp_avg_dtype, "--adam-beta1", args.adam_beta1),
        "--exp-avg-sq-dtype": (args.exp_avg_sq_dtype, "--adam-beta2", args.adam_beta2),
    }
    narrow = {flag: beta for flag, (dtype, *beta) in moments.items() if dtype == "bf16"}
    if args.use_precision_aware_optimizer and not narrow and not on_host:
        logger.warning(
            "--use-precision-aware-optimizer saves nothing while both moments are in fp32: add --exp-avg-dtype bf16"
        )
    for flag, (beta_flag, beta) in narrow.items():
        if not args.use_precision_aware_optimizer:
            problems.add(flag, "bf16", "needs --use-precision-aware-optimizer", "add it")
        elif on_host:
            problems.add(flag, "bf16", "moments in host memory stay in fp32", "leave it out")
        elif beta > MAX_BETA_BF16:
            rule = (
                f"needs {beta_flag} <= {MAX_BETA_BF16}: with {beta} the moment would stop as far as "
                f"{min(1.0, 2**-8 / (1 - beta)):.0%} from its mean: bf16 rounds changes of less than 1/256 away"
            )
            problems.add(flag, "bf16", rule, f"use fp32, or a smaller {beta_flag}")


def check_model_flags(hf_checkpoint: str, words: list[str]) -> None:
    """Flags that describe the model, such as those of scripts/models/*.sh, must agree with its checkpoint.

    Raises:
        ConfigError: they do not, or `words` are no flags.
        UnsupportedModelError: see `read_architecture`.
    """
    problems = Problems()
    _check_described(resolve(["--hf-checkpoint", hf_checkpoint, *words]), read_architecture(hf_checkpoint), problems)
    problems.raise_if_any()


def _check_recompute(args: Namespace, problems: Problems) -> None:
    if args.recompute_granularity == "full" and None in (args.recompute_method, args.recompute_num_layers):
        problems.add(
            "--recompute-granularity",
            "full",
            "needs --recompute-method and --recompute-num-layers",
            "add --recompute-method uniform --recompute-num-layers 1",
        )
    elif args.recompute_granularity != "full":
        for flag, value in (
            ("--recompute-method", args.recompute_method),
            ("--recompute-num-layers", args.recompute_num_layers),
        ):
            if value is not None:
                problems.add(flag, value, "needs --recompute-granularity full", "add it, or leave this out")


def _check_given(args: Namespace, problems: Problems) -> None:
    """What is given of Megatron's own flags and has one meaning here."""
    for flag, value in (("--attention-dropout", args.attention_dropout), ("--hidden-dropout", args.hidden_dropout)):
        if value != 0:
            rule = "must be 0: log-probs would differ between the pass before training, training and the engine"
            problems.add(flag, value, rule, "leave it out")
    for field in NEEDED:
        if vars(args).get(field) is False:
            problems.add(
                "--no-" + field.replace("_", "-"), None, f"not available yet: {REFUSED[field]}", "leave it out"
            )
    _check_user_buffers(args, problems)
    dispatcher = vars(args).get("moe_token_dispatcher_type")
    if dispatcher == "allgather":
        logger.warning("--moe-token-dispatcher-type allgather is replaced by alltoall: rows differ in length")
        args.moe_token_dispatcher_type = None
    elif dispatcher == "flex":
        problems.add("--moe-token-dispatcher-type", dispatcher, "needs DeepEP, which is not on PyPI", "leave it out")
    _check_balancing(args, problems)
    unread = [flag for flag in MEGATRON_FLAGS if flag.dest not in config_fields()]
    given = [flag.name for flag in unread if getattr(args, flag.dest) != flag.default]
    if given:
        logger.warning("%s: only for plug-in functions, as attributes of args; slime does not read them", given)


def _check_user_buffers(args: Namespace, problems: Problems) -> None:
    if vars(args).get("nccl_ub") and args.offload_train:
        rule = "excludes --offload-train: the buffers are registered once, with a group that the trainer then leaves"
        problems.add("--use-nccl-ub", None, rule, "leave it out")


def _check_balancing(args: Namespace, problems: Problems) -> None:
    """Routers of Megatron have slime's own loss: that of the other trainer, too."""
    flag, kind = "--moe-router-load-balancing-type", vars(args).get("moe_router_load_balancing_type")
    if kind == "sinkhorn":
        problems.add(flag, kind, "training and generation would choose other experts", "use aux_loss")
    elif kind == "none" and args.moe_aux_loss_coeff:
        problems.add(flag, kind, f"contradicts --moe-aux-loss-coeff {args.moe_aux_loss_coeff}", "use aux_loss")
    elif kind not in (None, "none", "aux_loss") and args.moe_aux_loss_coeff:
        problems.add(flag, kind, "is not built: the loss is balanced over a micro-batch", "use aux_loss")
    if kind is not None:
        args.moe_router_load_balancing_type = None  # Megatron's own stays off


def _check_described(args: Namespace, architecture: Architecture, problems: Problems) -> None:
    """Every difference between what the flags say of the model and what its checkpoint says."""
    fix = "leave it out: it follows from --hf-checkpoint"
    for dest, said in DESCRIBED.items():
        value, truth = getattr(args, dest), said(architecture)
        if value is not None and value != truth:
            rule = f"contradicts --hf-checkpoint {args.hf_checkpoint}, which has {'none' if truth is None else truth}"
            problems.add("--" + dest.replace("_", "-"), value, rule, fix)
    for dest, (flag, said) in SWITCHES.items():
        if getattr(args, dest) and not said(architecture):
            problems.add(flag, None, f"contradicts --hf-checkpoint {args.hf_checkpoint}, which has it not", fix)
    for flag in MEGATRON_FLAGS:
        value = getattr(args, flag.dest) if flag.dest in ARCHITECTURE else None
        if value is None:
            continue
        truth = architecture.get(flag.dest)
        if flag.dest == "moe_layer_freq":
            if isinstance(value, int):
                value = [int(layer % value == 0) for layer in range(architecture["num_layers"])]
            truth = [int(experts) for experts in architecture.moe_layers]
        elif flag.dest == "linear_attention_freq" and isinstance(value, int) and value > 0:
            value = [int((layer + 1) % value != 0) for layer in range(architecture["num_layers"])]
        if value != truth and (value or truth):
            rule = f"contradicts --hf-checkpoint {args.hf_checkpoint}, which has {'none' if truth is None else truth}"
            problems.add(flag.name, value, rule, fix)
    tensor = args.tensor_model_parallel_size
    padded = padded_vocab_size(architecture.vocab_size, args.make_vocab_size_divisible_by, tensor)
    if args.padded_vocab_size not in (None, padded):
        rule = (
            f"must be {padded}: {architecture.vocab_size} tokens, rounded up to a multiple of --make-vocab-size-"
            f"divisible-by {args.make_vocab_size_divisible_by} x --tensor-model-parallel-size {tensor}"
        )
        problems.add("--padded-vocab-size", args.padded_vocab_size, rule, "leave it out")


def _check_drafts(args: Namespace, architecture: Architecture, problems: Problems) -> None:
    if not args.enable_mtp_training:
        return
    if architecture.family in KEPT:
        rule = "is not built for this family, whose layers for multi-token prediction are kept as they are"
        problems.add("--enable-mtp-training", None, rule, "leave it out")
    elif not architecture.mtp_layers:
        rule = f"needs layers for multi-token prediction, and --hf-checkpoint {args.hf_checkpoint} has none"
        problems.add("--enable-mtp-training", None, rule, "leave it out")
    elif architecture.tied and args.pipeline_model_parallel_size > 1:
        rule = "excludes pipeline stages for a model whose output layer is its embedding"
        problems.add("--enable-mtp-training", None, rule, "use --tensor-model-parallel-size")


def _check_ranks(args: Namespace, architecture: Architecture, problems: Problems) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context, expert = args.context_parallel_size, args.expert_model_parallel_size
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    if world % (tensor * pipeline * context):
        problems.add(
            "--tensor-model-parallel-size",
            tensor,
            f"x --pipeline-model-parallel-size {pipeline} x --context-parallel-size {context} must divide the {world} "
            "trainer GPUs (--actor-num-nodes x --actor-num-gpus-per-node)",
        )
    _check_cut(args, architecture, "model", problems)
    teacher = args.opd_teacher_load if args.opd_type == "trainer" else None
    if is_hf_directory(teacher) and not problems.concern("--opd-teacher-load"):
        try:
            _check_cut(args, read_architecture(teacher), "teacher", problems)
        except UnsupportedModelError as error:
            problems.add("--opd-teacher-load", teacher, str(error))
    experts = architecture.get("num_moe_experts")
    if experts is None and args.moe_aux_loss_coeff:
        problems.add("--moe-aux-loss-coeff", args.moe_aux_loss_coeff, "needs a model with experts", "leave it out")
    if experts is None and expert > 1:
        problems.add("--expert-model-parallel-size", expert, "needs a model with experts", "leave it out")
    elif experts is not None:
        _check_experts(args, experts, world // pipeline, problems)


def _check_cut(args: Namespace, architecture: Architecture, whose: str, problems: Problems) -> None:
    """Whether heads, ranks of latent attention and layers come out even."""
    tensor = args.tensor_model_parallel_size
    cut = {"key/value heads": architecture["num_query_groups"]}
    if architecture.get("multi_latent_attention"):
        cut = {
            "attention heads": architecture["num_attention_heads"],
            "columns of keys and values (kv_lora_rank + rotated)": architecture["kv_lora_rank"]
            + architecture["qk_pos_emb_head_dim"],
            "q_lora_rank": architecture.get("q_lora_rank") or tensor,
        }
    if any(architecture.delta_net_layers):
        cut["key heads of gated delta nets"] = architecture["linear_num_key_heads"]
        if args.context_parallel_size > 1:
            rule = f"is not built for the {whose}'s gated delta nets, whose state goes through all of a sequence"
            fix = "use --tensor-model-parallel-size, --pipeline-model-parallel-size or --expert-model-parallel-size"
            problems.add("--context-parallel-size", args.context_parallel_size, rule, fix)
    for name, count in cut.items():
        if count % tensor:
            problems.add("--tensor-model-parallel-size", tensor, f"must divide the {whose}'s {count} {name}")
    _check_stages(args, architecture["num_layers"], whose, problems)


def _check_stages(args: Namespace, layers: int, whose: str, problems: Problems) -> None:
    """Stages share the layers evenly, but for a first and a last one of another length."""
    pipeline, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    given = vars(args)
    ends = {flag: given[field] for field, flag in _ENDS.items() if given.get(field) is not None}
    others, counted = pipeline - len(ends), layers + sum(bool(given.get(field)) for field in _COUNTED_AS_LAYERS)
    rest = counted - sum(ends.values())
    even = rest == 0 if others == 0 else others > 0 and rest > 0 and rest % (others * chunks) == 0
    if even and all(count > 0 and count % chunks == 0 for count in ends.values()):
        return
    if ends:
        flag, count = next(iter(ends.items()))
        rule = f"leaves {rest} of the {whose}'s {layers} layers to {others} other stages"
        shared = (
            f", of {chunks} chunks each: all must come out even" if chunks > 1 else ", which must share them evenly"
        )
        problems.add(flag, count, rule + shared)
    else:
        by = f"x --virtual-pipeline-model-parallel-size {chunks} " if chunks > 1 else ""
        what = f"{layers} layers" if counted == layers else f"{layers} layers + {counted - layers} counted as such"
        problems.add("--pipeline-model-parallel-size", pipeline, f"{by}must divide the {whose}'s {what}")


def _complete_virtual_stages(args: Namespace, architecture: Architecture, problems: Problems) -> None:
    """virtual_pipeline_model_parallel_size, also from --num-layers-per-virtual-pipeline-stage."""
    flag, layers = "--num-layers-per-virtual-pipeline-stage", args.num_layers_per_virtual_pipeline_stage
    pipeline = args.pipeline_model_parallel_size
    if layers is not None:
        per_stage = architecture["num_layers"] // pipeline
        if layers < 1 or per_stage % layers:
            problems.add(flag, layers, f"must divide the {per_stage} layers of a pipeline stage")
            return
        chunks = per_stage // layers
        if args.virtual_pipeline_model_parallel_size not in (None, chunks):
            given = args.virtual_pipeline_model_parallel_size
            problems.add(flag, layers, f"contradicts --virtual-pipeline-model-parallel-size {given}", "give one")
            return
        args.virtual_pipeline_model_parallel_size = chunks
    if args.virtual_pipeline_model_parallel_size == 1:
        args.virtual_pipeline_model_parallel_size = None
    if args.virtual_pipeline_model_parallel_size is not None and pipeline == 1:
        name = "--virtual-pipeline-model-parallel-size" if layers is None else flag
        problems.add(name, None, "has no effect without pipeline stages", "add --pipeline-model-parallel-size")


def _check_experts(args: Namespace, experts: int, per_stage: int, problems: Problems) -> None:
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    if tensor > 1 and not args.sequence_parallel:
        problems.add(
            "--tensor-model-parallel-size",
            tensor,
            "needs --sequence-parallel for a model with experts (Megatron refuses it otherwise)",
            "add --sequence-parallel",
        )
    if experts % expert:
        problems.add("--expert-model-parallel-size", expert, f"must divide the model's {experts} experts")
    if per_stage % (expert * expert_tensor):
        problems.add(
            "--expert-model-parallel-size",
            expert,
            f"x --expert-tensor-parallel-size {expert_tensor} must divide the {per_stage} GPUs of a pipeline stage",
        )
