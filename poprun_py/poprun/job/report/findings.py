"""What there is to say about a failure: the last words of who failed, and what the machine knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from poprun.job.report.last_words import LastWords, last_words
from poprun.probe.kernel_kills import KillCounts
from poprun.probe.memory import Evidence, evidence_since


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is known of a job that did not end well.

    Attributes:
        evidence: What is known of the machine.
        words: What the instances that ended with an error said last, by index.
        launcher_words: What the launcher said last.
    """

    evidence: Evidence = field(default_factory=Evidence)
    words: Mapping[int, LastWords] = field(default_factory=dict)
    launcher_words: LastWords = field(default_factory=LastWords)

    def words_of(self, instance: int) -> LastWords:
        """What an instance said last."""
        return self.words.get(instance, LastWords())


def gather_findings(
    tails: Mapping[int, Sequence[str]], launcher_output: Sequence[str], kills_before: KillCounts | None
) -> Findings:
    """What is known now that the job has ended.

    Args:
        tails: The last lines of the standard error of each instance that ended with an error, by index.
        launcher_output: The last lines that the launcher printed.
        kills_before: What the kernel had counted when the job began; None for a job of several machines, of the
            others of which nothing is known.
    """
    return Findings(
        evidence=Evidence() if kills_before is None else evidence_since(kills_before),
        words={index: last_words(tail) for index, tail in tails.items()},
        launcher_words=last_words(launcher_output),
    )
