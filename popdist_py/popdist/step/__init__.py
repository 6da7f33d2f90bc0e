"""One training step of a replicated model, and the checks that refuse a wrong step."""
