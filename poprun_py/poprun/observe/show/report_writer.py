"""The writer of a job's report files, HTML and JSON, while the job runs and at its end."""

import os
import time
from collections.abc import Sequence
from typing import Final

from poprun.errors import UsageError
from poprun.observe.account.job_record import JobRecord
from poprun.observe.show.page import render_page
from poprun.observe.show.report_file import render_job
from poprun.text import screen
from poprun.text.atomic_file import check_target, write_whole

PAGE: Final = ".html"
DATA: Final = ".json"

_FIRST_SECONDS: Final = 1.0
_GAP_SECONDS: Final = 30.0
_LARGEST_SHARE: Final = 0.02  # largest share of poprun's time in which it writes reports


class ReportWriter:
    """The writer of a job's report files; if a file cannot be written, it logs one warning for this file."""

    def __init__(self, files: Sequence[str], folder: str) -> None:
        self._paths = {file: os.path.join(folder, file) for file in files if file.endswith((PAGE, DATA))}
        self._warned_files: set[str] = set()
        self._next_seconds = time.monotonic() + _FIRST_SECONDS

    def check(self) -> None:
        """Raise UsageError if a file of the report cannot be written."""
        for file, path in self._paths.items():
            try:
                check_target(path)
            except OSError as error:
                raise UsageError(f"--report {file} cannot be written: {error.strerror}") from None

    def is_due(self, now_seconds: float) -> bool:
        """Whether it is time to write the report of a running job again."""
        return now_seconds >= self._next_seconds

    def write(self, job: JobRecord) -> None:
        """Write the report of ``job`` to each file, in place of the report before."""
        began_seconds = time.monotonic()
        for file, path in self._paths.items():
            try:
                write_whole(path, render_job(job) if file.endswith(DATA) else render_page(job))
            except OSError as error:
                if file not in self._warned_files:
                    so = "" if job.is_over else "; the job goes on"
                    screen.log(f"warning: --report {path} cannot be written: {error.strerror}{so}")
                self._warned_files.add(file)
        now_seconds = time.monotonic()
        self._next_seconds = now_seconds + max(_GAP_SECONDS, (now_seconds - began_seconds) / _LARGEST_SHARE)
