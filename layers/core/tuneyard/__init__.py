"""Tuneyard's core: what every door, in Lambda and on a machine you own, shares."""

__version__ = "0.1.0"
