"""The command `poprun --doctor`: what a job can use on this machine, and what is missing.

`facts` examines the machine; `diagnosis` draws conclusions with remedies and prints them as a table or JSON.
"""
