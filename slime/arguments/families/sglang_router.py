"""Arguments of sglang-router (0.3.2), with the prefix --router-."""

from slime.arguments.flag import STORE_TRUE, Family, Flag, integer, number, text

PREFIX = "--router-"

_TEXT = """
    policy prefill-policy decode-policy assignment-mode log-dir log-level service-discovery-namespace prometheus-host
    health-check-endpoint model-path tokenizer-path chat-template reasoning-parser tool-call-parser mcp-config-path
    backend history-backend oracle-wallet-path oracle-tns-alias oracle-connect-descriptor oracle-username
    client-cert-path client-key-path tls-cert-path tls-key-path otlp-traces-endpoint jwt-issuer jwt-audience
    jwt-jwks-uri
"""
_SECRET = "oracle-password postgres-db-url redis-url api-key"
_LISTS = """
    selector prefill-selector decode-selector request-id-headers cors-allowed-origins ca-cert-paths jwt-role-mapping
"""
_SECRET_LISTS = "control-plane-api-keys"
_INTEGERS = """
    balance-abs-threshold bucket-adjust-interval-secs eviction-interval-secs max-tree-size max-idle-secs
    max-payload-size worker-startup-timeout-secs worker-startup-check-interval service-discovery-port prometheus-port
    request-timeout-secs shutdown-grace-period-secs max-concurrent-requests queue-size queue-timeout-secs
    rate-limit-tokens-per-second retry-max-retries retry-initial-backoff-ms retry-max-backoff-ms cb-failure-threshold
    cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs health-failure-threshold
    health-success-threshold health-check-timeout-secs health-check-interval-secs tokenizer-cache-l0-max-entries
    tokenizer-cache-l1-max-memory oracle-pool-min oracle-pool-max oracle-pool-timeout-secs postgres-pool-max
    redis-pool-max redis-retention-days
"""
_NUMBERS = "cache-threshold balance-rel-threshold retry-backoff-multiplier retry-jitter-factor"
_NUMBER_LISTS = "prometheus-duration-buckets"
_SWITCHES = """
    dp-aware enable-igw pd-disaggregation service-discovery disable-retries disable-circuit-breaker
    disable-health-check tokenizer-cache-enable-l0 tokenizer-cache-enable-l1 enable-trace control-plane-audit-enabled
"""


def _flags(names: str, kind, **options) -> tuple[Flag, ...]:
    return tuple(
        Flag(PREFIX + name, kind, help=f"sglang-router's --{name}.", **options) for name in sorted(names.split())
    )


FAMILY = Family(
    "sglang-router",
    "Passed to sglang-router as they are, without the prefix; its own defaults hold. slime sets host, port"
    " and workers.",
    (
        *_flags(_TEXT, text),
        *_flags(_SECRET, text, secret=True),
        *_flags(_LISTS, text, nargs="+"),
        *_flags(_SECRET_LISTS, text, nargs="+", secret=True),
        *_flags(_INTEGERS, integer),
        *_flags(_NUMBERS, number),
        *_flags(_NUMBER_LISTS, number, nargs="+"),
        *_flags(_SWITCHES, text, action=STORE_TRUE),
    ),
)
