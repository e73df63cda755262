"""Measures, models and records that sections share."""
