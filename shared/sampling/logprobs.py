"""What is told of a row of logits: the logprob and rank of one id, and the likeliest ids.

In the softmax of the bare logits below the vocabulary's end, summed in float64 and told in float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrelay.shared.types import Logprobs


def logprobs_of(row: NDArray[np.float32], token: int, tops: int) -> Logprobs:
    """The likeliest id has the rank 1; of equal ones the lowest comes first.

    The largest of the row is finite.
    """
    wide = row.astype(np.float64)
    top = wide.max()
    told = (row - (top + np.log(np.exp(wide - top).sum()))).astype(np.float32)
    rank = 1 + np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])
    first = np.argsort(-row, kind="stable")[:tops]
    likeliest = zip(first.tolist(), told[first].tolist(), strict=True)
    return Logprobs(float(told[token]), int(rank), tuple(likeliest))
