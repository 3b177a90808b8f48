"""Steps that are compiled for TPU pods without a TPU, and times from the compiler's estimates."""
