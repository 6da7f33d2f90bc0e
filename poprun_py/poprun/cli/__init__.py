"""The command line: the table of options, and how words, variables and files become values of poprun's own."""
