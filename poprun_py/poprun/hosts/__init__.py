"""The other hosts of a job: how they are reached, and the look at each of them before anything starts.

`preflight` asks the hosts through `questions`, which `remote_side` answers there; `problems` judges the answers.
`routes` holds what was found, and the words of ssh and srun.
"""
