"""Values as text, and text as values: numbers, host names, fields of files, and what poprun writes itself."""
