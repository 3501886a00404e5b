"""Fill the weights of one engine rank (a destination of a sync) and prove by digests that the values
arrived."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.reshard.copier import CopyPlan
from megarl.reshard.digest import Digest
from megarl.reshard.plan import RectCopy
from megarl.reshard.transfer import dst_view, plan_copies, src_view
from megarl.reshard.transports.exported import Exported


@dataclass(frozen=True)
class Arrival:
    """The message of one source to one destination when a version of its weights is complete."""

    version: int
    digests: list[int]
    """Sampled digests of the values that the destination must hold, one per RectCopy of the pair."""
    full: list[int] | None = None
    """Digests over all values, with --check-weight-sync."""
    exported: Exported | None = None
    """Location of the weights, if the destination pulls them and they have moved."""
    problem: str | None = None
    """Reason why there are no digests; the other fields are then empty."""


class Destination:
    """The weights of one engine rank: pulls from sources whose memory this process can read, and checks the
    values of all sources.

    Args:
        rank: rank of this destination in the plan.
        copies: source rank -> the copies that it fills, from the plan.
        tensors: name -> [rows, cols] live view."""

    def __init__(
        self, rank: int, copies: dict[int, tuple[RectCopy, ...]], tensors: dict[str, Tensor]
    ) -> None:
        self.rank, self._copies, self._tensors = rank, copies, tensors
        self._views = {
            source: [dst_view(copy, tensors) for copy in of_source] for source, of_source in copies.items()
        }
        self._digests = {
            source: Digest(views, num_threads=torch.get_num_threads())
            for source, views in self._views.items()
        }
        self._pulled: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._plan: CopyPlan | None = None
        self.bytes: int = sum(
            view.numel() * view.element_size() for views in self._views.values() for view in views
        )
        """Number of bytes that one version writes here, by any transport."""

    def pull_from(
        self, source: int, tensors: dict[str, Tensor], copies: tuple[RectCopy, ...] | None = None
    ) -> None:
        """Read this source's weights from `tensors` in all later pulls.

        Args:
            copies: the copies, if the weights are arranged otherwise than in the source's atlas."""
        pairs = zip(copies or self._copies[source], self._views[source], strict=True)
        self._pulled[source] = [(src_view(copy, tensors), view) for copy, view in pairs]
        self._plan = None

    def pull(self) -> None:
        """Copy the weights of all sources that are pulled, with the GIL released."""
        if self._plan is None:
            self._plan = plan_copies([pair for pairs in self._pulled.values() for pair in pairs])
        self._plan.run()

    def difference(self, arrivals: dict[int, Arrival]) -> str | None:
        """Return an error that names the first tensor whose digest is not the one that its source sent, or
        None."""
        for source, arrival in sorted(arrivals.items()):
            compared = [("sampled", arrival.digests, self._digests[source].sampled(arrival.version))]
            if arrival.full is not None:
                compared.append(("full", arrival.full, self._digests[source].full()))
            for kind, sent, received in compared:
                if sent == received:
                    continue
                for copy, there, here in zip(self._copies[source], sent, received, strict=True):
                    if there != here:
                        return (
                            f"[rank {self.rank}] "
                            f"{copy.dst_name}[{copy.dst_row}:{copy.dst_row + copy.rows}, {copy.dst_col}:"
                            f"{copy.dst_col + copy.cols}] is not what rank {source} sent from "
                            f"{copy.src_name}: {kind} digest "
                            f"{here:016x}, sent {there:016x}"
                        )
        return None
