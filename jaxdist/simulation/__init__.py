"""Simulations in virtual time: parameter servers, fleets, and the choice between exchanges."""
