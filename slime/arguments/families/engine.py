"""Inference engines. Flags that both engines share carry SGLang's names."""

from slime.arguments import pending
from slime.arguments.flag import STORE_TRUE, Family, Flag, integer, number, text

PREFIX = "--sglang-"

OWNED_BY_SLIME = {
    "model_path": "--hf-checkpoint",
    "trust_remote_code": "--trust-remote-code",
    "random_seed": "--seed",
    "enable_memory_saver": "--offload-rollout",
    "tp_size": "--rollout-num-gpus-per-engine",
    "enable_return_routed_experts": "--use-rollout-routing-replay",
    "port": None,
    "nnodes": None,
    "node_rank": None,
    "dist_init_addr": None,
    "gpu_id_step": None,
    "base_gpu_id": None,
    "nccl_port": None,
    "skip_server_warmup": None,
}
"""SGLang arguments that slime sets, and the flag that decides them, if there is one."""

FAMILY = Family(
    "Engine",
    "The inference servers. Other `--sglang-*` flags become available with the SGLang engine.",
    (
        Flag(
            "--rollout-engine",
            text,
            "embedded",
            "Inference engine.",
            choices=("embedded", "sglang"),
            pending_choices={"sglang": "the SGLang engine is not built yet; use embedded"},
        ),
        Flag("--sglang-context-length", integer, help="Longest context. Default: the model's."),
        Flag("--sglang-max-running-requests", integer, 256, "Requests decoded together."),
        Flag("--sglang-max-total-tokens", integer, help="Tokens in the KV cache. Default: what memory allows."),
        Flag("--sglang-page-size", integer, 16, "Tokens per page of the KV cache."),
        Flag("--sglang-chunked-prefill-size", integer, help="Prompt tokens per prefill step."),
        Flag(
            "--sglang-mem-fraction-static",
            number,
            help="Share of device memory for weights and KV cache. Default: 0.6 under --colocate, else 0.85.",
        ),
        Flag(
            "--sglang-dtype",
            text,
            help="Precision of the engine. Default: --dtype.",
            choices=("float32", "bfloat16", "float16"),
        ),
        Flag("--sglang-server-concurrency", integer, 512, "Requests in flight per engine."),
        Flag("--sglang-config", text, help="YAML of server groups.", pending=pending.SGLANG),
        Flag("--prefill-num-servers", integer, help="Servers that only prefill.", pending=pending.SGLANG),
        Flag(
            "--rollout-external",
            action=STORE_TRUE,
            help="Use servers that already run.",
            pending=pending.EXTERNAL_ENGINES,
        ),
        Flag(
            "--rollout-external-engine-addrs",
            text,
            nargs="+",
            help="host:port of those servers.",
            pending=pending.EXTERNAL_ENGINES,
        ),
        Flag(
            "--use-fault-tolerance",
            action=STORE_TRUE,
            help="Check engines and restart failed ones.",
            pending=pending.FAULT_TOLERANCE,
        ),
        Flag(
            "--rollout-health-check-interval",
            number,
            30.0,
            "Seconds between checks.",
            pending=pending.FAULT_TOLERANCE,
        ),
        Flag(
            "--rollout-health-check-timeout",
            number,
            30.0,
            "Seconds until a check fails.",
            pending=pending.FAULT_TOLERANCE,
        ),
        Flag(
            "--rollout-health-check-first-wait",
            number,
            300.0,
            "Seconds before the first check.",
            pending=pending.FAULT_TOLERANCE,
        ),
    ),
)
