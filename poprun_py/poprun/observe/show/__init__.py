"""The output about a job: the printed end, the report and its page, the live view, the trace, the metrics."""
