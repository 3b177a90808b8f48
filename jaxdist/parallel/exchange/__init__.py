"""The implementations of `jaxdist.parallel.contract.Exchange`, the exchange of gradients."""
