"""Judgements about a job: who is at fault for its end or its hang, who is slow, and whether to restart."""
