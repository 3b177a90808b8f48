"""The page of `jaxdist study review`: what survey articles compare, computed or recorded here."""
