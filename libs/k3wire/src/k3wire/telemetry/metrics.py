"""The catalogue of metrics: every name, unit, bucket and meaning, in one place.

Names follow OpenTelemetry's `gen_ai.*` conventions where they have one, and `k3_` elsewhere.
Labels are few and closed: role, stage, tier, outcome, code. Nothing from a request is a label.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
"""What this process exposes; a process has one service, so one registry."""

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_DURATION_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_TPOT_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip

REQUEST_DURATION = Histogram(
    "gen_ai_server_request_duration_seconds",
    "From the request's arrival to its last token.",
    ["code"],
    buckets=_DURATION_S,
    registry=REGISTRY,
)
TIME_TO_FIRST_TOKEN = Histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From the request's arrival to its first token.",
    buckets=_TTFT_S,
    registry=REGISTRY,
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean gap between output tokens after the first, a request.",
    buckets=_TPOT_S,
    registry=REGISTRY,
)
TOKENS = Counter(
    "gen_ai_client_token_usage_total",
    "Tokens of finished requests, by kind: input, cached, output, reasoning.",
    ["kind"],
    registry=REGISTRY,
)
REQUESTS = Counter(
    "k3_requests_total", "Requests ended, by error code; `ok` if there was none.", ["code"],
    registry=REGISTRY,
)  # fmt: skip
REQUESTS_RUNNING = Gauge("k3_requests_running", "Requests in this process now.", registry=REGISTRY)
RETRIES = Counter(
    "k3_retries_total", "Attempts after the first, by the code that caused them.", ["code"],
    registry=REGISTRY,
)  # fmt: skip
TIER_LOOKUPS = Counter(
    "k3_tier_lookups_total",
    "Items asked of a cache tier, by outcome: hit, partial, miss, bypass.",
    ["tier", "outcome"],
    registry=REGISTRY,
)
TIER_SAVED = Counter(
    "k3_tier_saved_seconds_total",
    "Time that hits of a tier saved, against the measured cost of the work they skipped.",
    ["tier"],
    registry=REGISTRY,
)
STAGE_DURATION = Histogram(
    "k3_stage_duration_seconds",
    "Time in a stage itself, deeper stages excluded, one observation a report.",
    ["stage"],
    buckets=_FAST_S,
    registry=REGISTRY,
)
HANDLER_FAULTS = Counter(
    "k3_handler_faults_total", "Exceptions that no error of the tree covers.", registry=REGISTRY
)
STEP_DURATION = Histogram(
    "k3_step_duration_seconds",
    "One step of the engine.",
    buckets=_FAST_S,
    registry=REGISTRY,
)
PAGES_FREE = Gauge("k3_pages_free", "Pages free or reclaimable.", registry=REGISTRY)
PAGES = Gauge("k3_pages", "Pages of the arena.", registry=REGISTRY)
REUSE_GAP_TOKENS = Counter(
    "k3_reuse_gap_tokens_total",
    "Prompt tokens whose rows matched but that were computed again, by reason.",
    ["reason"],
    registry=REGISTRY,
)
