"""The messages between poprun, its agents and its monitors, and the connection for the messages."""


class ProtocolError(Exception):
    """Error for received data that is not a valid message."""
