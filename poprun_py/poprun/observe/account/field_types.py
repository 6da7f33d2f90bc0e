"""Types of the fields in a job's report, each with a rule that a value in a report must follow."""

from typing import Annotated

from poprun.text.fields import between
from poprun.text.screen import visible

Text = Annotated[str, visible]  # a program may have written the text, so control codes are made visible
Index = Annotated[int, between(0, 10**6)]
Count = Annotated[int, between(0, 2**63)]
Seconds = Annotated[float, between(0.0, 1e12)]
