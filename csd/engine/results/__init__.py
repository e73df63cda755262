"""Results of a call: records of its steps, samples with their statistics, and their views."""
