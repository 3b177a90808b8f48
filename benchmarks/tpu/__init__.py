"""Steps compiled for TPU pods without a TPU, and the time that their compiler estimates."""
