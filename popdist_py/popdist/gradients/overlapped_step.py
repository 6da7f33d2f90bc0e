"""One step whose gradients go early: what is sent when, whether it was right, and what is owed to the others."""

from collections.abc import Sequence
from threading import RLock
from typing import Final

import torch
from torch import Tensor

from popdist.gradients.early_rows import Publishing
from popdist.gradients.flat_gradients import GradientRows
from popdist.gradients.overlap import Overlap
from popdist.groups import Exchange
from popdist.headers import as_floats
from popdist.tree import TreeSum

_BITS: Final = {torch.float32: torch.int32, torch.float64: torch.int64}
"""What numbers are compared as: a NaN is not equal to itself, and 0.0 is to -0.0."""


class OverlappedStep:
    """The step that has the channel: made before it is announced, and ended in every case.

    Args:
        overlap: Of the model's gradients.
        number: What the overlap offers; greater than 0.
        scales: Whether weights are divided by the heaviest one of the job.
    """

    def __init__(self, overlap: Overlap, number: int, *, scales: bool) -> None:
        self.number = number
        self._overlap = overlap
        self._scales = scales
        self._lock = RLock()
        """Gradients of several devices come in a thread each."""
        self._announced: Exchange | None = None
        self._unit: float | None = None
        self._is_refused = self._is_closed = self._is_over = False
        self._arrived: set[int] = set()
        self._num_awaited = overlap.num_expected()
        self._num_issued = self._num_early = 0
        self._publishing: Publishing | None = None
        overlap.channel.is_taken = True

    def listen(self, announced: Exchange) -> None:
        """The header with :attr:`number` has been sent."""
        self._announced = announced
        announced.peek()

    def begin(self, micro_batches: TreeSum[GradientRows], replicas: TreeSum[GradientRows], weight: float) -> None:
        """The last micro batch begins.

        Args:
            micro_batches: Those of its replica before it.
            replicas: Those of this instance before its own.
            weight: What the micro batch counts.
        """
        if weight:
            self._publishing = Publishing(self._overlap, micro_batches, replicas, weight)

    def take(self, parameter: Tensor) -> None:
        """A gradient has been accumulated: send the buckets that are complete, if all instances want them."""
        if self._publishing is None:
            return
        with self._lock:
            self._publishing.look_at(parameter)
            self._arrive(parameter)
            while self._num_issued < len(self._num_awaited) and not self._num_awaited[self._num_issued]:
                if not self._is_agreed() or not self._publishing.can_read(self._num_issued):
                    return
                self._issue(self._publishing.partials_of(self._num_issued, self._unit or 1.0))
                self._num_early += 1

    def close(self, own: Sequence[GradientRows]) -> int:
        """The gradients are complete: send what is left of them.

        Args:
            own: This instance's part of the tree over all replicas.

        Returns:
            What to say: that the sums are right as far as this instance knows, or 0.
        """
        with self._lock:
            if not self._is_agreed():
                return 0
            self._publishing = None
            self._issue_rest(own)
            self._is_closed = True
            is_final = self._is_final(own[-1])
            self._overlap.learn(self._arrived, is_final=is_final)
            return -self.number if is_final else 0

    def wait(self, *, are_right: bool) -> GradientRows | None:
        """When all instances have come to the end of the step: wait for what is on its way.

        Args:
            are_right: Whether all have said that the sums are.

        Returns:
            The sums over the job, if they are right.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        if self._num_issued:
            self._overlap.channel.wait()
            self._num_issued = 0
        return self._overlap.sums if are_right else None

    def end(self) -> None:
        """Let another step go early; send what the others still expect where this one was left. Never raises."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self._publishing = True, None
            if not self._is_closed and self._is_agreed():
                self._issue_rest([self._overlap.published])
            elif self._announced is not None and self._unit is None and not self._is_refused:
                self._overlap.channel.break_off()  # the others may still agree, without this one
            if self._num_issued:
                self._overlap.leave_rows()
            self._overlap.channel.is_taken = False

    def _arrive(self, parameter: Tensor) -> None:
        bucket = self._overlap.bucket_of.get(id(parameter))
        if bucket is not None and id(parameter) not in self._arrived:
            self._arrived.add(id(parameter))
            self._num_awaited[bucket] -= id(parameter) in self._overlap.expected

    def _is_agreed(self) -> bool:
        """Whether all instances have said that they send what this one does."""
        if self._unit is None and self._announced is not None and not self._is_refused:
            numbers = self._announced.peek()
            if numbers is not None:
                heaviest = as_floats([words[0] for words in numbers])
                self._is_refused = {words[1] for words in numbers} != {self.number} or not any(heaviest)
                self._unit = None if self._is_refused else max(heaviest) if self._scales else 1.0
        return self._unit is not None

    def _issue(self, partials: Sequence[Tensor]) -> None:
        """Send the next bucket; if interrupted, it may have gone or not, so no instance sends early any more."""
        bucket = self._overlap.buckets[self._num_issued]
        self._num_issued += 1
        try:
            self._overlap.issue(bucket, partials)
        except BaseException:
            self._overlap.channel.break_off()
            raise

    def _issue_rest(self, own: Sequence[GradientRows]) -> None:
        for bucket in self._overlap.buckets[self._num_issued :]:
            self._issue([it.rows[bucket.kind][bucket.run] for it in own])

    def _is_final(self, last: GradientRows) -> bool:
        """Whether what was sent early has the bits of ``last``."""
        starts = {bucket.kind: bucket.start for bucket in self._overlap.buckets[: self._num_early]}
        pairs = [
            (self._overlap.published.rows[kind][start:], last.rows[kind][start:]) for kind, start in starts.items()
        ]
        return all(torch.equal(sent.view(_BITS[sent.dtype]), own.view(_BITS[own.dtype])) for sent, own in pairs)
