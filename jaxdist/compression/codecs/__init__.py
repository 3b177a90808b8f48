"""Ways to write an array in few bytes, each one a `jaxdist.compression.contract.Codec`."""
