"""Loops that observe a step, insert into the consensus graph and look up, for the backend "cpu"."""
