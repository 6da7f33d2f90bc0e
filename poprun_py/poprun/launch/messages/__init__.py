"""The messages of poprun, its agents and its monitors, and the connection that carries them."""


class ProtocolError(Exception):
    """The error when the other side sent something that is no message."""
