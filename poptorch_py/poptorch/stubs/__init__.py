"""Libraries that programs for PopTorch import beside it, as far as they use them, where they are not installed."""
