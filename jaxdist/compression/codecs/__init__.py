"""The implementations of `jaxdist.compression.contract.Codec`, which encode arrays in few bytes."""
