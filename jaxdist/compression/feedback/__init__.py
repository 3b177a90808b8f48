"""The implementations of `jaxdist.compression.feedback.contract.Feedback`, the error feedback."""
