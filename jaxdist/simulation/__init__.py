"""Simulations: parameter servers, fleets and choices in virtual time."""
