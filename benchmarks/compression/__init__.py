"""The bench `jaxdist bench compression`, of compressed gradients."""
