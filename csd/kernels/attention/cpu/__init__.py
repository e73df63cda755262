"""Loops of tree attention and of `commit_kv`, for the backend "cpu"."""
