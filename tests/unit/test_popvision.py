"""What the variables of programs for PopVision ask for."""

import pytest

from poprun.plan.popvision import asked_trace

ON = '{"autoReport.all":"true", "autoReport.directory":"./report"}'


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"POPLAR_ENGINE_OPTIONS": ON}, "./report"),
        ({"POPLAR_ENGINE_OPTIONS": '{"autoReport.outputExecutionProfile": true}'}, "."),
        ({"POPLAR_ENGINE_OPTIONS": ON, "PVTI_OPTIONS": '{"directory": "d"}'}, "./report"),
        ({"PVTI_OPTIONS": '{"enable":"true", "directory":"d"}'}, "d"),
        ({"PVTI_OPTIONS": "what"}, "."),
        ({"PVTI_OPTIONS": '{"enable":"false"}'}, None),
        ({"POPLAR_ENGINE_OPTIONS": "what"}, None),
        ({"POPLAR_ENGINE_OPTIONS": '{"target.hostSyncTimeout": 900}'}, None),
        ({"POPLAR_ENGINE_OPTIONS": "[1]"}, None),
        ({}, None),
    ],
)
def test_variables_ask_for_a_trace(variables: dict[str, str], folder: str | None) -> None:
    """Into their directory, or that of the job; what cannot be read counts as the libraries count it."""
    trace = asked_trace(variables)
    assert (trace and trace.folder) == folder
    assert trace is None or trace.seconds
