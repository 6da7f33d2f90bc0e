"""The command line: the table of options; parsing of arguments, environment variables and files of options."""
