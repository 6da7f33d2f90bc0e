"""The output of the programs: poprun reads it, writes logs, divides it into lines, adds tags and shows it."""
