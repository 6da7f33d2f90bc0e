"""What poprun would use on this machine, and what is missing: `poprun --doctor`.

`facts` looks at the machine; `diagnosis` says what that means and what to do, as a table or as JSON.
"""
