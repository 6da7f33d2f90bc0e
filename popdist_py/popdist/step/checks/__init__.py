"""Checks against misuse: what costs time, or could be left out without changing a bit of a right program.

Importing this has the steps of models and of torch's optimizers checked. With ``popdist.init(checks="off")`` the
checks of a model's steps are not made.
"""

from popdist.step.checks import optimizer_checks, step_checks

step_checks.install()
optimizer_checks.install()
