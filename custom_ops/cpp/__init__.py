"""The operators on the CPU: C++ with OpenMP, called through `custom_ops.native`."""
