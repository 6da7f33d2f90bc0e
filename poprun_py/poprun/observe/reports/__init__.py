"""The program `poprun-report`: it reads the reports of jobs that poprun wrote."""
