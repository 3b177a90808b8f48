"""The page of `jaxdist study review`, which compares methods as survey articles compare them."""
