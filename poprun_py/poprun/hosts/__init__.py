"""The other hosts of a job: how poprun reaches the hosts, and a check of every host before the job starts.

`preflight` asks the hosts through `questions`; `remote_side` answers on each host; `problems` finds problems in
the answers. `poprun.launch.routes` has the results and the commands of ssh and srun.
"""
