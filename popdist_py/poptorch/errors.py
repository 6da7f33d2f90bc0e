"""What poptorch raises."""


class Error(Exception):
    """A program asked for what poptorch cannot do, or gave a model something that does not fit it."""


class ConfigFileError(Error):
    """A line of a file of options is no call of a setter; the message names file and line."""
