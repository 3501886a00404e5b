"""Turn samples of rows of a data set into a batch."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.batch import Batch
from megarl.data.rendering import RowSample


def batch_of_rows(sample_ids: Sequence[int], samples: Sequence[RowSample]) -> Batch:
    """Return the samples as one batch, in this order."""
    return Batch.from_samples(
        list(sample_ids),
        [one.prompt for one in samples],
        [one.response for one in samples],
        holes=[one.holes for one in samples],
    )
