"""Checks against misuse, which cost time; a correct program computes the same bits without these checks.

Importing this package makes popdist check the steps of models and of torch's optimizers. With
``popdist.init(checks="off")`` the checks of a model's steps are not made.
"""

from popdist.step.checks import optimizer_checks, step_checks

step_checks.install()
optimizer_checks.install()
