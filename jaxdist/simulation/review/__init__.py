"""The page of `jaxdist study review`, which makes the comparisons of survey articles."""
