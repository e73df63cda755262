"""The decoder that runs the user's own module, with csd's attention."""
