"""The command line: words in, a request or a plan out, then a print-out or a job. Nothing below knows click."""
