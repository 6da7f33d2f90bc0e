"""The most probable label sequences of a CTC model, by prefix beam search.

Graves, "Supervised Sequence Labelling with Recurrent Neural Networks", 2012, chapter 7.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from poptorch.errors import Error, check_arguments

Logs = NDArray[np.float64]


def ctc_beam_search_decoder(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> list[Tensor]:
    """The ``top_paths`` most probable label sequences of each sample.

    Args:
        probs: Logarithms of probabilities, of shape (time, samples, classes).
        lengths: The time of each sample, of shape (samples,).
        blank: The class that stands for no label.
        beam_width: How many sequences are followed at a time.
        top_paths: How many are returned.

    Returns:
        The logarithms of their probabilities, in the dtype of ``probs`` and of shape (samples, top_paths); their
        lengths (int32), of the same shape; and their labels (int32), of shape (samples, top_paths, time), with
        ``blank`` after their ends. Where there are fewer sequences, the rest is empty and improbable.
    """
    check_arguments("ctc_beam_search_decoder", "a tensor", probs=probs, lengths=lengths)
    check_arguments(
        "ctc_beam_search_decoder", "a whole number", blank=blank, beam_width=beam_width, top_paths=top_paths
    )
    if probs.dim() != 3 or lengths.shape != probs.shape[1:2]:
        raise Error(
            "ctc_beam_search_decoder takes (time, samples, classes) and a length for each sample, and was given "
            f"shapes {list(probs.shape)} and {list(lengths.shape)}"
        )
    time, num_samples, num_classes = probs.shape
    if not 0 <= blank < num_classes or not 1 <= top_paths <= beam_width:
        raise Error(
            f"ctc_beam_search_decoder: blank {blank} must be one of {num_classes} classes, and {top_paths} paths "
            f"cannot be more than the beam of {beam_width}"
        )
    ends = lengths.tolist()
    if any(not 0 <= end <= time for end in ends):
        raise Error(f"ctc_beam_search_decoder: lengths must be from 0 to {time}, and are {ends}")
    logs = probs.detach().to("cpu", torch.float64).numpy()
    values = torch.full((num_samples, top_paths), -torch.inf, dtype=probs.dtype, device="cpu")
    counts = torch.zeros(num_samples, top_paths, dtype=torch.int32, device="cpu")
    labels = torch.full((num_samples, top_paths, time), blank, dtype=torch.int32, device="cpu")
    for sample, end in enumerate(ends):
        found = _search(logs[:end, sample], blank, beam_width)
        for path, (sequence, value) in enumerate(found[:top_paths]):
            values[sample, path], counts[sample, path] = value, len(sequence)
            labels[sample, path, : len(sequence)] = torch.tensor(sequence, dtype=torch.int32, device="cpu")
    return [values.to(probs.device), counts.to(probs.device), labels.to(probs.device)]


class CTCBeamSearchDecoder(nn.Module):
    """``ctc_beam_search_decoder`` as a module."""

    def __init__(self, blank: int = 0, beam_width: int = 100, top_paths: int = 1) -> None:
        super().__init__()
        self.blank, self.beam_width, self.top_paths = blank, beam_width, top_paths

    def forward(self, probs: Tensor, lengths: Tensor) -> list[Tensor]:
        """The most probable label sequences of each sample."""
        return ctc_beam_search_decoder(probs, lengths, self.blank, self.beam_width, self.top_paths)


@dataclass(frozen=True, slots=True)
class _Beam:
    """Sequences that are followed, the most probable one first."""

    sequences: list[tuple[int, ...]]  # their labels
    blanks: Logs  # logarithm of the probability of all paths of each sequence that end with a blank
    others: Logs  # the same for the paths that end with its last label

    @property
    def totals(self) -> Logs:
        return np.logaddexp(self.blanks, self.others)

    def next(self, logs: Logs, blank: int, width: int) -> Self:
        """The beam after one more moment, in which the classes have probabilities ``logs``."""
        totals = self.totals
        last = np.array([sequence[-1] if sequence else blank for sequence in self.sequences])
        kept_blanks = totals + logs[blank]
        kept_others = np.where([bool(one) for one in self.sequences], self.others + logs[last], -np.inf)
        longer = totals[:, None] + logs[None, :]
        rows = np.arange(len(last))
        longer[rows, last] = self.blanks + logs[last]  # a label twice needs a blank between
        longer[:, blank] = -np.inf
        place = {sequence: position for position, sequence in enumerate(self.sequences)}
        for position, sequence in enumerate(self.sequences):
            before = place.get(sequence[:-1]) if sequence else None
            if before is not None:  # what this would become is followed already
                label = sequence[-1]
                kept_others[position] = np.logaddexp(kept_others[position], longer[before, label])
                longer[before, label] = -np.inf
        candidates = np.concatenate([np.logaddexp(kept_blanks, kept_others), longer.ravel()])
        best = np.argsort(-candidates, kind="stable")[:width]
        best = best[candidates[best] > -np.inf]
        num_kept, num_classes = len(last), len(logs)
        is_kept = best < num_kept
        origin = np.where(is_kept, best, (best - num_kept) // num_classes)
        labels = (best - num_kept) % num_classes
        return type(self)(
            [self.sequences[origin[k]] + (() if is_kept[k] else (int(labels[k]),)) for k in range(len(best))],
            np.where(is_kept, kept_blanks[origin], -np.inf),
            np.where(is_kept, kept_others[origin], candidates[best]),
        )


def _search(logs: Logs, blank: int, width: int) -> list[tuple[tuple[int, ...], float]]:
    """Sequences with the logarithms of their probabilities, the most probable one first."""
    with np.errstate(divide="ignore", invalid="ignore"):
        beam = _Beam([()], np.zeros(1), np.full(1, -np.inf))
        for moment in logs:
            beam = beam.next(moment, blank, width)
        return list(zip(beam.sequences, beam.totals.tolist(), strict=True))
