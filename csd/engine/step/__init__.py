"""The step: drafts, one pass, verification."""
