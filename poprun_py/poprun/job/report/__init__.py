"""How a job ended, in words: the first failure, its traceback, and what the machine knows about it. Pure."""
