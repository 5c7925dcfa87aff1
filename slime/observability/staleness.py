"""How old the weights were that generated what is trained on, in weight versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from slime.utils.types import Sample


def count_token_versions(samples: Iterable[Sample]) -> dict[int, int]:
    """Trained response tokens per weight version; those of no version, or of one that is no number, are left out."""
    counts: Counter[int] = Counter()
    for sample in samples:
        if sample.remove_sample:
            continue
        for version, start, end in sample.weight_version_spans:
            tokens = end - start if sample.loss_mask is None else sum(sample.loss_mask[start:end])
            if tokens and version.isdigit():
                counts[int(version)] += tokens
    return dict(counts)


def staleness_metrics(token_versions: Mapping[int, int], current: int | None) -> dict[str, float]:
    """Per token, the versions between the weights that generated it and `current`, those it is trained with.

    `rollout/staleness/mean`, `/max` and `/stale_ratio` (the share of tokens that are not of `current`); nothing when
    that is unknown.
    """
    total = sum(token_versions.values())
    if current is None or not total:
        return {}
    return {
        "rollout/staleness/mean": sum((current - v) * n for v, n in token_versions.items()) / total,
        "rollout/staleness/max": float(current - min(token_versions)),
        "rollout/staleness/stale_ratio": 1 - token_versions.get(current, 0) / total,
    }
