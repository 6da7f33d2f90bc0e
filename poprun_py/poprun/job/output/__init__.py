"""The programs' output: read, kept in logs, cut into lines, tagged and shown."""
