"""Results of a call, and their views."""
