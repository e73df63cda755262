"""Sections of `bench.gpu`, one file each."""
