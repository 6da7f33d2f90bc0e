"""A checkpoint on the disk: the files of tensors, and a manifest in JSON with the digests of all files.

The digests are compared before anything is loaded, so that every changed bit is found.
"""

import hashlib
import json
import platform
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import torch

from popdist.checkpoint.encoding import Json
from popdist.checkpoint.stored_tensors import StoredPiece
from popdist.errors import CheckpointError
from popdist.ground import contract
from popdist.ground.accelerators import accelerator
from popdist.ground.layout import Parallelism
from popdist.ground.local_tensors import TensorForm
from popdist.job import context
from popdist.phases.store_file import digest_of_pieces, is_in_pieces

FORMAT: Final = 2
FORMAT_WITH_STORES: Final = 3
"""The format of a checkpoint that has files copied from the store of a model in phases."""

MANIFEST: Final = "manifest.json"
TENSORS: Final = "tensors"
"""The name of the directory of the files with tensors."""

_CPU_NAMES: Final = ("model name", "cpu model", "CPU part")
"""The names with which ``/proc/cpuinfo`` describes the kind of CPU, on different architectures."""

_CPU_INFO: Final = Path("/proc/cpuinfo")

PARTS: Final = "parts of a replica"
"""The name of the condition that says how several instances share a replica."""

Conditions = dict[str, str | int]
"""The conditions that determine the bits of a training, by name, such as ``threads per replica``."""


def current_conditions() -> Conditions:
    """Return the conditions, such as versions and CPU, that determine the bits of a training here and now."""
    # the query of an accelerator that the job does not use would start the accelerator
    device = context.device() if accelerator.type_in_use() else torch.device("cpu")
    return {
        "popdist": contract.VERSION,
        "torch": torch.__version__,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CPU": _cpu_kind(),
        "device": device.type if device.type == "cpu" else accelerator.name_of(device),
        "threads per replica": torch.get_num_threads(),
        "algorithms": "deterministic" if torch.are_deterministic_algorithms_enabled() else "any",
        "replicas": context.num_replicas(),
        PARTS: _parts(context.environment().contract.parallelism),
    }


def differences(before: Conditions, now: Conditions) -> list[str]:
    """Return a text for each condition, such as torch's version, that differs in ``before`` and in ``now``."""
    return [
        f"{name}: {before[name]} then, {now[name]} now"
        for name in now
        if name in before and before[name] != now[name]
    ]


def _parts(shared: Parallelism) -> str:
    if not shared.has_mesh:
        return f"{shared.instances_per_replica}"
    return f"{shared.instances_per_replica} (tensor={shared.tensor}, pipeline={shared.pipeline})"


def _cpu_kind() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    kinds = (value.strip() for name, _, value in pairs if name.strip() in _CPU_NAMES)
    return next(kinds, platform.machine())


class DamagedError(Exception):
    """The error for a checkpoint that has changed since it was written; the message names what has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's JSON file (manifest): everything except the values of the tensors."""

    step: int
    conditions: Conditions
    states: dict[str, Json]
    values: dict[str, Json]
    forms: dict[str, TensorForm]
    files: dict[str, str]
    """The digests of the files in ``TENSORS``; the key is the name of the file."""
    stored: dict[str, list[StoredPiece]] = field(default_factory=dict)
    """The pieces of tensors, by the tensor's name, that are in files of stores and not in files of DCP."""

    @classmethod
    def from_json(cls, found: Json) -> Self:
        """Make a manifest from the JSON that :meth:`to_json` returned."""
        forms = {name: TensorForm.from_json(form) for name, form in found["forms"].items()}
        stored = {name: [*map(StoredPiece.from_json, them)] for name, them in found.get("stored", {}).items()}
        return cls(**{name: found[name] for name in _PLAIN}, forms=forms, stored=stored)

    def to_json(self) -> Json:
        """Return the manifest as a JSON value, for :meth:`from_json`."""
        found = {name: getattr(self, name) for name in _PLAIN}
        forms = {name: form.to_json() for name, form in self.forms.items()}
        stored = {name: [it.to_json() for it in them] for name, them in self.stored.items()}
        return found | {"forms": forms, "stored": stored}


_PLAIN: Final = ("step", "conditions", "states", "values", "files")
"""The fields of a manifest that are JSON values already."""


def write(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in ``directory``."""
    content = manifest.to_json()
    number = FORMAT_WITH_STORES if manifest.stored else FORMAT
    whole = {"format": number, "popdist": contract.VERSION, "digest": _digest_of(content), "manifest": content}
    (directory / MANIFEST).write_text(json.dumps(whole), encoding="utf-8")


def read(directory: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``directory``; raise DamagedError if the manifest has changed."""
    try:
        whole = json.loads((directory / MANIFEST).read_bytes())
        if whole["format"] not in (FORMAT, FORMAT_WITH_STORES):
            raise CheckpointError(
                f"{directory} was written by popdist {whole['popdist']} in format {whole['format']}, and this is "
                f"popdist {contract.VERSION}, which reads formats {FORMAT} and {FORMAT_WITH_STORES}: use the "
                "popdist that wrote it, or another folder"
            )
        if whole["digest"] != _digest_of(whole["manifest"]):
            raise DamagedError(f"{MANIFEST} has changed since it was written")
        return Manifest.from_json(whole["manifest"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({error!r})") from error


def check_files(directory: Path, digests: Mapping[str, str]) -> None:
    """Raise DamagedError if a file of the checkpoint is missing, or has another digest than in ``digests``."""
    for name, digest in digests.items():
        try:
            if "/" in name or not stat.S_ISREG((directory / TENSORS / name).lstat().st_mode):
                raise DamagedError(f"{MANIFEST} names {name!r}, which is no plain file of this checkpoint")
            found = (digest_of_pieces if is_in_pieces(digest) else digest_of_file)(directory / TENSORS / name)
        except OSError as error:
            raise DamagedError(f"{TENSORS}/{name} cannot be read ({error!r})") from error
        if found != digest:
            raise DamagedError(f"{TENSORS}/{name} has changed since it was written")


def digest_of_file(path: Path) -> str:
    """Return the digest of all bytes of the file ``path``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _digest_of(content: Json) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()
