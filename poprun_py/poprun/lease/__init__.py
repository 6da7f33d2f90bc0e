"""The virtual IPUs and cores of a job: leased before it starts, kept while it runs, given back at its end."""
