"""What is known of a job: the state of its instances, what they told, their curves, and its report as values."""
