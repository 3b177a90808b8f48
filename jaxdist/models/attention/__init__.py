"""The kernels of attention: a contract, a file for each kernel, and the choice of a kernel."""
