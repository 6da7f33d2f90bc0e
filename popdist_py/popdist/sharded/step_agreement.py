"""Instances that take a step of a sharded optimizer together tell each other how it goes.

Each updates its own part of the weights, so what goes wrong on one is wrong for all: none goes on with weights of
which a part is missing, or was updated with another learning rate.
"""

import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

from popdist.errors import OptimizerError
from popdist.gradients.step_end import COURTESY_SECONDS
from popdist.groups import Group
from popdist.headers import name_instances
from popdist.sharded.optimizer_settings import PLAIN


def report(group: Group, text: str, trouble: Exception | None, settings: int = 0) -> None:
    """Wait for all instances, and raise on each of them if one has failed.

    Args:
        group: All instances of the job.
        text: What they do, in words.
        trouble: Why this one cannot.
        settings: A digest of what must be equal.

    Raises:
        Exception: The ``trouble``.
        OptimizerError: If it is another instance's, or the settings differ.
        CollectiveError, BackendError: If the instances do other things, or one was lost.
    """
    told = group.start(text, [trouble is not None, settings]).wait()
    if trouble is not None:
        raise trouble
    if failed := [i for i, (has_failed, _) in zip(group.instances, told, strict=True) if has_failed]:
        time.sleep(COURTESY_SECONDS)  # they shall end first, with the cause
        raise OptimizerError(
            f"{name_instances(failed)} failed in {text} (see the error there), so a part of the weights was not "
            "updated"
        )
    if differing := [i for i, (_, other) in zip(group.instances, told, strict=True) if other != settings]:
        raise OptimizerError(
            f"{text}: the settings of the parameter groups of instance {group.backend.instance_index} are not "
            f"those of {name_instances(differing)}, and each updates a part of the weights: set the same learning "
            "rate and the like everywhere; a schedule that goes by a metric needs its mean over all instances"
        )


def digest_of(groups: Iterable[Mapping[str, Any]], names: Iterable[str]) -> int:
    """A number for the settings ``names`` of an optimizer's groups, as far as they have a text of their own."""
    known = sorted(names)
    texts = [repr([group.get(it) for it in known if isinstance(group.get(it), PLAIN)]) for group in groups]
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode(), digest_size=7).digest(), "little")
