"""The simulations in virtual time: parameter servers, fleets, and the choice of an exchange."""
