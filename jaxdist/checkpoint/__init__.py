"""Checkpoints that are whole or not there: saved in the background, verified before they load."""
