"""Files that a program asks for when its model is compiled: a profile, and a description of the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from poptorch.environment import exported_file
from poptorch.options import Options


def write_files(options: Options, kind: str, tensors: Mapping[str, Tensor], compilation_seconds: float) -> None:
    """Write what is asked for: ``profile.pop`` for ``enableProfiling``, and ``POPTORCH_EXPORT_PROTO_FILE``.

    Both are JSON: there is no Poplar whose formats they could have.

    Args:
        options: Of the model.
        kind: ``"training"`` or ``"inference"``: the folder of the profile, unless the model has a name.
        tensors: Its parameters and buffers.
        compilation_seconds: How long its compilation took.
    """
    description: dict[str, Any] = {
        "kind": kind,
        "compilation_seconds": compilation_seconds,
        "tensors": {name: {"shape": list(it.shape), "dtype": str(it.dtype)} for name, it in tensors.items()},
    }
    text = json.dumps(description, indent=1)
    engine_options = options._Popart.options.get("engineOptions", {})  # noqa: SLF001 - where enableProfiling puts it
    if engine_options.get("autoReport.all") == "true":
        folder = Path(engine_options.get("autoReport.directory", "."))
        _write(folder / (options.model_name if options.exists("model_name") else kind) / "profile.pop", text)
    if path := exported_file():
        _write(Path(path), text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
