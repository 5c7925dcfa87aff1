"""What slime does with each field of Megatron's configuration classes: tables, data only.

A field in none of these tables is passed on to Megatron as it is given.
"""

from __future__ import annotations

OWNED: dict[str, str] = {
    "params_dtype": "use --dtype",
    "pipeline_dtype": "use --dtype",
    "autocast_dtype": "use --dtype",
    "calculate_per_token_loss": "use --calculate-per-token-loss, which slime's own losses obey",
    "variable_seq_lengths": "leave it out: packed rows always have their own lengths",
    "deallocate_pipeline_outputs": "leave it out: it is on",
    "use_distributed_optimizer": "leave it out: it is on",
    "grad_reduce_in_fp32": "leave it out: gradients are always summed in fp32",
    "gradient_reduce_div_fusion": "leave it out: gradients are summed, not averaged",
    "average_in_collective": "leave it out: gradients are summed, not averaged",
    "virtual_pipeline_model_parallel_size": "use --num-layers-per-virtual-pipeline-stage",
    "transformer_impl": "leave it out: it follows from what is installed",
    "init_model_with_meta_device": "leave it out: weights come from a checkpoint",
    "perform_initialization": "leave it out: weights come from a checkpoint",
    "use_cpu_initialization": "leave it out: weights come from a checkpoint",
    "init_method_std": "leave it out: weights come from a checkpoint",
    "embedding_init_method_std": "leave it out: weights come from a checkpoint",
    "config_logger_dir": "leave it out: --save and the run directory hold the resolved configuration",
    "moe_enable_routing_replay": "use --use-routing-replay",
    "barrier_with_L1_time": "leave it out: slime has its own timers",
    "optimizer": "use --optimizer",
}
"""slime sets these itself -> what to do instead of giving them."""

ARCHITECTURE = frozenset(
    "softmax_type softmax_scale glu_linear_offset activation_func_clamp_value "
    "apply_residual_connection_post_layernorm layernorm_zero_centered_gamma rotary_interleaved "
    "rotary_scaling_factor window_size window_attn_skip_freq "
    "qk_l2_norm attention_output_gate no_rope_freq experimental_attention_variant dsa_indexer_n_heads "
    "dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq "
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
    "moe_shared_expert_gate moe_latent_size mrope_section is_hybrid_model heterogeneous_block_specs "
    "original_max_position_embeddings rope_type beta_fast beta_slow mscale mscale_all_dim moe_layer_freq "
    "moe_router_pre_softmax layernorm_epsilon gated_linear_unit num_moe_experts".split()
)
"""They describe the model: given, they must agree with the checkpoint."""

_TRANSFORMER_ENGINE = "needs Transformer Engine or apex, which slime does not use"
_OTHER_ATTENTION = "slime's own attention over packed rows takes the place of what it configures"
_INFERENCE = "is for Megatron's inference; slime generates with its engines"
_CUDA_GRAPHS = "CUDA graphs need rows of equal length; packed rows have their own"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        "apply_rope_fusion fused_single_qkv_rope gradient_accumulation_fusion masked_softmax_fusion "
        "persist_layer_norm memory_efficient_layer_norm cpu_offloading cpu_offloading_num_layers "
        "cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering delay_wgrad_compute "
        "moe_permute_fusion moe_router_fusion moe_use_legacy_grouped_gemm "
        "moe_router_padding_for_quantization moe_router_padding_for_fp8 use_te_activation_func use_te_rng_tracker "
        "disable_parameter_transpose_cache symmetric_ar_type fine_grained_activation_offloading offload_modules "
        "min_offloaded_tensor_size activation_func_fp8_input_store use_kitchen use_kitchen_attention "
        "kitchen_attention_backend quant_recipe tp_only_amax_red first_last_layers_bf16 "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 reuse_grad_buf_for_mxfp8_param_ag "
        "keep_fp8_transpose_cache ep_overlap_early_attn_memory_release overlap_moe_expert_parallel_comm "
        "use_fused_weighted_squared_relu store_param_remainders".split(),
        _TRANSFORMER_ENGINE,
    ),
    **dict.fromkeys(
        "main_grads_dtype main_params_dtype".split(), "gradients are summed, and parameters kept, in fp32"
    ),
    **dict.fromkeys(
        "apply_query_key_layer_scaling cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel "
        "max_seqlen_per_dp_cp_rank qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit "
        "batch_invariant_mode".split(),
        _OTHER_ATTENTION,
    ),
    **dict.fromkeys(
        "inference_rng_tracker inference_sampling_seed use_inference_optimized_layers inference_fuse_tp_communication "
        "flash_decode mlp_chunks_for_prefill cache_mla_latents".split(),
        _INFERENCE,
    ),
    **dict.fromkeys(
        "cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute "
        "wgrad_deferral_limit".split(),
        "slime computes log-probs from hidden states in chunks, in the place of Megatron's output layer and loss",
    ),
    **dict.fromkeys(
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
        "suggested_communication_unit_size preserve_fp32_weights fsdp_double_buffer fsdp_manual_registration "
        "hetereogenous_dist_checkpoint".split(),
        "is for Megatron's own FSDP; use --train-backend fsdp",
    ),
    **dict.fromkeys(
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path".split(),
        "models with Mamba layers are not built",
    ),
    **dict.fromkeys(
        "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps "
        "muon_tp_mode muon_extra_scale_factor sgd_momentum decoupled_weight_decay".split(),
        "only AdamW is built",
    ),
    **dict.fromkeys(
        "decoupled_lr decoupled_min_lr".split(), "one learning rate holds for all parameters; use --lr and --min-lr"
    ),
    **dict.fromkeys(
        "overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather".split(),
        "Megatron waits for a layer's weights when the layer is called, and slime reads the output layer's without it",
    ),
    **dict.fromkeys(
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params".split(),
        "--optimizer-cpu-offload keeps all moments in pinned host memory",
    ),
    **dict.fromkeys(
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis".split(),
        "only float16 needs loss scaling, which is not built; use bfloat16",
    ),
    **dict.fromkeys(
        "moe_per_layer_logging log_num_zeros_in_grad".split(), "is for Megatron's own log; slime has its own metrics"
    ),
    **dict.fromkeys(
        "enable_autocast test_mode mtp_standalone moe_extended_tp enable_cuda_graph external_cuda_graph "
        "async_tensor_model_parallel_allreduce".split(),
        "is deprecated in Megatron or has no use here",
    ),
    "num_distributed_optimizer_instances": "the optimizer is cut over all data-parallel ranks",
    "pipeline_model_parallel_comm_backend": "all groups use --distributed-backend",
    "moe_z_loss_coeff": "the router has no losses of its own",
    "moe_router_topk_limited_devices": "is Megatron's old name of --moe-router-group-topk",
    "pipeline_model_parallel_layout": "stages of consecutive layers are built alone",
    "microbatch_group_size_per_vp_stage": "chunks take turns after as many micro-batches as there are stages",
    "moe_token_dropping": "dropped tokens would make training and generation differ",
    "moe_expert_capacity_factor": "dropped tokens would make training and generation differ",
    "moe_pad_expert_input_to_capacity": "dropped tokens would make training and generation differ",
    "moe_token_drop_policy": "dropped tokens would make training and generation differ",
    "moe_input_jitter_eps": "noise in the router would make training and generation differ",
    "moe_router_force_load_balancing": "random routing is for benchmarks; it would train on other experts",
    "moe_apply_probs_on_input": "changes what the model computes; it follows from --hf-checkpoint",
}
"""What cannot work here -> why."""

NEEDED = ("decoupled_weight_decay", "pin_cpu_grads", "pin_cpu_params")
"""Switches of `REFUSED` that cannot be off; of the others nothing but off is built."""

REFUSED_PREFIXES: dict[str, str] = {
    "fp8": _TRANSFORMER_ENGINE,
    "fp4": _TRANSFORMER_ENGINE,
    "tp_comm_": _TRANSFORMER_ENGINE,
    "moe_deepep": "needs DeepEP, which is not on PyPI",
    "moe_hybridep": "needs DeepEP, which is not on PyPI",
    "moe_enable_deepep": "needs DeepEP, which is not on PyPI",
    "moe_flex_dispatcher": "needs DeepEP, which is not on PyPI",
    "cuda_graph": _CUDA_GRAPHS,
    "dsa_": "sparse attention is not built",
}

ALIASES: dict[str, tuple[str, ...]] = {
    "bias_activation_fusion": ("--bias-swiglu-fusion", "--bias-gelu-fusion"),
    "apply_rope_fusion": ("--rope-fusion",),
    "overlap_p2p_comm": ("--overlap-p2p-communication",),
    "bucket_size": ("--ddp-bucket-size",),
    "average_in_collective": ("--ddp-average-in-collective",),
    "pad_buckets_for_high_nccl_busbw": ("--ddp-pad-buckets-for-high-nccl-busbw",),
    "reduce_scatter_with_fp32_accumulation": ("--ddp-reduce-scatter-with-fp32-accumulation",),
    "check_for_nan_in_grad": ("--check-for-nan-in-loss-and-grad",),
    "num_layers_in_first_pipeline_stage": ("--decoder-first-pipeline-num-layers",),
    "num_layers_in_last_pipeline_stage": ("--decoder-last-pipeline-num-layers",),
    "nccl_ub": ("--use-nccl-ub",),
}
"""Names of Megatron's command line that differ from the field's. Each switch also has its --no- form."""


def refusal(field: str) -> str | None:
    """Why a field cannot be given; None if it can."""
    if field in REFUSED:
        return REFUSED[field]
    return next((reason for prefix, reason in REFUSED_PREFIXES.items() if field.startswith(prefix)), None)


def owned(flag: str) -> str | None:
    """What to do instead of giving a flag that slime sets itself; None for others."""
    return OWNED.get(_field_of(flag))


def is_field(flag: str) -> bool:
    """Whether the tables know it, also where no Megatron is installed."""
    field = _field_of(flag)
    return field in ALIASES or field in ARCHITECTURE or refusal(field) is not None


def _field_of(flag: str) -> str:
    name = "--" + flag.removeprefix("--").removeprefix("no-")
    return next((field for field, names in ALIASES.items() if name in names), name[2:].replace("-", "_"))
