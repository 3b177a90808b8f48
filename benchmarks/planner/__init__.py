"""The predictions of `jaxdist plan`, compared with compiled programs and published runs."""
