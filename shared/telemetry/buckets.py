"""Bounds of the histograms: fit for small and large models, from half a millisecond to minutes."""

from __future__ import annotations

from typing import Final

TTFT_BUCKETS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0,
    10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TPOT_BUCKETS_S: Final = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1,
    0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
DURATION_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
STEP_BUCKETS_S: Final = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.2, 0.3, 0.5, 1.0, 2.0,
)  # fmt: skip
STEP_TOKENS_BUCKETS: Final = tuple(2**power for power in range(15))
STAGE_BUCKETS_S: Final = TTFT_BUCKETS_S
"""Of parts of a request, which are compared with it."""
COUNT_BUCKETS: Final = tuple(float(2**power) for power in range(0, 18))
RELAY_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0,
)  # fmt: skip
RATIO_BUCKETS: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)
