"""The operators in CUDA C++: compiled at run time by NVRTC, for the GPU that is there."""
