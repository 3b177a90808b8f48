"""The exchanges of gradients, each a `jaxdist.parallel.contract.Exchange`."""
