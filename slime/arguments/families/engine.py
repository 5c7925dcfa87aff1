"""Inference engines. Flags that both engines share carry SGLang's names."""

from __future__ import annotations

import functools

from slime.arguments.flag import STORE_TRUE, Family, Flag, integer, number, text

PREFIX = "--sglang-"
INSTALL_SGLANG = 'pip install "slime[sglang]"'

OWNED_BY_SLIME = {
    "model_path": "--hf-checkpoint",
    "trust_remote_code": "--trust-remote-code",
    "random_seed": "--seed",
    "enable_memory_saver": "--offload-rollout",
    "tp_size": "--rollout-num-gpus-per-engine",
    "enable_return_routed_experts": "--use-rollout-routing-replay",
    "disaggregation_mode": "--prefill-num-servers",
    "disaggregation_bootstrap_port": None,
    "port": None,
    "nnodes": None,
    "node_rank": None,
    "dist_init_addr": None,
    "gpu_id_step": None,
    "base_gpu_id": None,
    "nccl_port": None,
    "skip_server_warmup": None,
    "host": None,
    "device": "--device",
    # These put another server in front of the engine than the one that slime guards.
    "tokenizer_worker_num": None,
    "enable_http2": None,
    "grpc_mode": None,
    "smg_grpc_mode": None,
    "encoder_only": None,
    "use_ray": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "api_key": None,
    "admin_api_key": None,
}
"""SGLang arguments that slime sets, and the flag that decides them, if there is one."""

SHARED = (
    "context_length",
    "max_running_requests",
    "max_total_tokens",
    "page_size",
    "chunked_prefill_size",
    "enable_deterministic_inference",
)
"""Arguments that mean the same for both engines, beside mem_fraction_static."""

FAMILY = Family(
    "Engine",
    "The inference servers. With SGLang installed, all of its server arguments are accepted as `--sglang-*` beside "
    "these: `slime flags sglang` lists them.",
    (
        Flag(
            "--rollout-engine",
            text,
            help="Inference engine. Default: sglang where a GPU and SGLang are present, else embedded.",
            choices=("embedded", "sglang"),
        ),
        Flag("--sglang-context-length", integer, help="Longest context. Default: the model's."),
        Flag("--sglang-max-running-requests", integer, help="Requests decoded together. Default: the engine's (256)."),
        Flag("--sglang-max-total-tokens", integer, help="Tokens in the KV cache. Default: what memory allows."),
        Flag("--sglang-page-size", integer, help="Tokens per page of the KV cache. Default: the engine's (16)."),
        Flag("--sglang-chunked-prefill-size", integer, help="Prompt tokens per prefill step."),
        Flag(
            "--sglang-mem-fraction-static",
            number,
            help="Share of device memory for weights and KV cache. Default: 0.6 under --colocate; else 0.85 with the "
            "embedded engine, and SGLang's own choice with SGLang.",
        ),
        Flag(
            "--sglang-dtype",
            text,
            help="Precision of the engine. Default: --dtype.",
            choices=("float32", "bfloat16", "float16"),
        ),
        Flag(
            "--sglang-enable-deterministic-inference",
            action=STORE_TRUE,
            help="A sample depends on its seed (--rollout-seed + its index) alone, not on what runs beside it. The "
            "embedded engine always works so; SGLang does on a GPU, more slowly.",
        ),
        Flag("--sglang-server-concurrency", integer, 512, "Requests in flight per engine."),
        Flag(
            "--sglang-config",
            text,
            help="YAML of the models to serve, each in groups of servers with their own GPUs and arguments "
            "(docs/engines.md).",
        ),
        Flag(
            "--prefill-num-servers",
            integer,
            help="Of the engines, so many only prefill and the others only decode. Needs SGLang and sglang-router.",
        ),
        Flag(
            "--rollout-external",
            action=STORE_TRUE,
            help="Use engines that already run. They are neither started nor ended, and not restarted.",
        ),
        Flag(
            "--rollout-external-engine-addrs",
            text,
            nargs="+",
            help="host:port of those engines.",
        ),
        Flag(
            "--use-fault-tolerance",
            action=STORE_TRUE,
            help="Check engines and restart failed ones. The rollout in flight goes on.",
        ),
        Flag(
            "--rollout-health-check-interval",
            number,
            30.0,
            "Seconds between checks.",
        ),
        Flag(
            "--rollout-health-check-timeout",
            number,
            30.0,
            "Seconds until a check fails.",
        ),
        Flag(
            "--rollout-health-check-first-wait",
            number,
            300.0,
            "Seconds before the first check.",
        ),
    ),
)


def shared_server_flags() -> tuple[Flag, ...]:
    """Flags of the table above that a SGLang server is given as they are."""
    return tuple(
        flag for flag in FAMILY.flags if flag.dest.removeprefix("sglang_") in (*SHARED, "mem_fraction_static")
    )


def attribute_of(name: str) -> str | None:
    """The server argument that `--sglang-...` means, under any of SGLang's names for it; None for other flags."""
    name = "--" + name.lstrip("-").replace("_", "-")
    if not name.startswith(PREFIX):
        return None
    from slime.backends.sglang_utils.arguments import server_flags

    known = {spelling: flag.dest for flag in server_flags() for spelling in flag.names}
    return known.get(name, name[2:].replace("-", "_")).removeprefix("sglang_")


@functools.cache
def server_family() -> Family | None:
    """All other server arguments of the installed SGLang; None when it is not installed."""
    from slime.backends.sglang_utils.arguments import server_family as read_family

    own = {name for flag in FAMILY.flags for name in (*flag.names, flag.dest)}
    return read_family(without=own | {f"sglang_{name}" for name in OWNED_BY_SLIME})
