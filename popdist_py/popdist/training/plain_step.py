"""The step of a job with one replica and one micro batch: the gradient is what torch has left in ``.grad``.

Nothing is added up and nobody is asked, so the step costs as little as can be, and its bits are those of a loop
without popdist. What it says and refuses is what `popdist.training.step` does.
"""

from torch import Tensor

from popdist.errors import BatchError
from popdist.gradients.model_gradients import ModelGradients
from popdist.gradients.step_end import NotFinite, Reduction, not_finite_error
from popdist.groups import Group
from popdist.progress_report import presence
from popdist.training.step import out_of_order


class PlainStep:
    """A step with one micro batch in the whole job: made when it starts, fed once, finished or abandoned.

    Args:
        group: The one instance of the job.
        gradients: Of the model's parameters. The ``.grad`` of those that are trained is set to None.
        checks_finite: Whether to look for NaN and infinity in the gradient.
    """

    accumulation = 1

    def __init__(self, group: Group, gradients: ModelGradients, *, checks_finite: bool) -> None:
        self._group = group
        self._gradients = gradients
        self._checks_finite = checks_finite
        self._weight: float | None = None
        gradients.clear()

    def announce(self, heaviest: float, _reduction: Reduction) -> None:
        """See that there is something to do.

        Raises:
            BatchError: If the micro batch weighs nothing.
            PopdistError: What was found where nothing could be raised.
        """
        self._group.raise_failure()
        if not heaviest:
            raise BatchError("the batches of all instances have 0 samples, so this step has no gradient")

    def begin(self, index: int, _weight: float) -> int:
        """Get ready for micro batch ``index``, which is 0; the number of its replica.

        Raises:
            BatchError: If there is no such micro batch, or it is done.
        """
        position = 0 if self._weight is None else 1
        if index or position:
            raise out_of_order(index, position, num_local_replicas=1, accumulation=1)
        return 0

    def take(self, parameter: Tensor) -> None:
        """A gradient has been accumulated: it stays where it is."""

    def collect(self, weight: float) -> None:
        """The micro batch has seen its backward passes."""
        self._weight = weight

    def finish(self, reduction: Reduction) -> None:
        """Leave each ``.grad`` as it is; for a sum, times the weight.

        Raises:
            BatchError: If there was no micro batch, or it had no weight: then there is no mean.
            GradientError: If gradients are checked and one is not finite.
        """
        if reduction == "mean" and not self._weight:
            raise BatchError("the one micro batch of this step has no weight, so this step has no gradient")
        if self._checks_finite and self._weight:
            self._check_finite()
        if reduction == "sum" and self._weight != 1:
            gradients = self._gradients.find()
            rows = gradients.make_rows()
            gradients.fill(rows, times=self._weight or 0.0)
            gradients.give(rows, gradients.used())
        presence.count_step()

    def _check_finite(self) -> None:
        gradients = self._gradients.find()
        parameter = gradients.not_finite()
        if parameter is not None:
            raise not_finite_error(NotFinite(0, parameter), gradients)

    def abandon(self) -> None:
        """Leave without a gradient."""
        self._gradients.clear()
