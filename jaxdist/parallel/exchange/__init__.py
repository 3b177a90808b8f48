"""Ways to exchange gradients, each one a `jaxdist.parallel.contract.Exchange`."""
