"""Measurement of the cost of a step."""
