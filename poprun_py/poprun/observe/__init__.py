"""The account of a job: ``account`` has what is known, ``judge`` what follows from it, ``show`` what users see."""
