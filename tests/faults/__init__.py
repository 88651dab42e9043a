"""What happens on a cluster of several nodes when parts of it fail."""
