"""The account of a job: ``account`` has the facts, ``judge`` the conclusions, and ``show`` the output."""
