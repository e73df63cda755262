"""Work of a machine's first call: checks, compilation and timing, whose results are cached."""
