"""The page of `jaxdist study review`, with the comparisons that survey articles make."""
