"""The look at every host of a job before anything is started there, all at once and in a bounded time.

`examine` asks; `remote_side` answers, on the hosts themselves; `conversation` is the line between them, through
ssh. `judgement` says what is wrong with a host, `addresses` which of its addresses the job uses; both are pure.
`environment_copy` brings the Python environment to hosts that lack it.
"""

from poprun.preflight.examine import examine_hosts

__all__ = ["examine_hosts"]
