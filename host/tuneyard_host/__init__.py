"""Tuneyard on a machine you own: the local stack, the trainer and the inference service."""
