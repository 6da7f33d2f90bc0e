"""The environment variables with which PopTorch programs ask for a profile, which poprun records as a trace."""

import json
from collections.abc import Mapping
from typing import Final

from poprun.plan.request import TraceSettings

ENGINE_OPTIONS: Final = "POPLAR_ENGINE_OPTIONS"
TRACE_OPTIONS: Final = "PVTI_OPTIONS"

_HERE: Final = "."
_SECONDS: Final = 5.0
_REPORTS: Final = ("autoReport.all", "autoReport.outputExecutionProfile")


def asked_trace(variables: Mapping[str, str]) -> TraceSettings | None:
    """Return the settings of the trace (profile) that PopTorch's ``variables`` ask for; None without a request."""
    engine = _options(variables.get(ENGINE_OPTIONS, ""))
    if engine and any(_is_on(engine.get(name)) for name in _REPORTS):
        return TraceSettings(folder=str(engine.get("autoReport.directory") or _HERE), seconds=_SECONDS)
    if TRACE_OPTIONS not in variables:
        return None
    options = _options(variables[TRACE_OPTIONS]) or {}  # invalid JSON also asks for a trace, as in PVTI
    if not _is_on(options.get("enable", True)):
        return None
    return TraceSettings(folder=str(options.get("directory") or _HERE), seconds=_SECONDS)


def _options(text: str) -> dict[str, object] | None:
    try:
        options = json.loads(text)
    except ValueError:
        return None
    return options if isinstance(options, dict) else None


def _is_on(value: object) -> bool:
    return str(value).lower() == "true"
