"""What a poptorch program takes from popdist: options that know its job."""

from popdist.poptorch.job_options import Options

__all__ = ["Options"]
