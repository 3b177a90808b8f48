"""The codecs, which write an array in few bytes: each a `jaxdist.compression.contract.Codec`."""
