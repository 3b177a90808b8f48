"""The predictions of `jaxdist plan`, held against compiled programs and published runs."""
