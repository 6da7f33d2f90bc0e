"""The output about a job: the printed end, the report and its HTML page, the live view, trace and metrics."""
