"""The operators in Triton: for GPUs, and on the CPU in its interpreter (TRITON_INTERPRET=1, to be set before
Triton is imported).

Why the bits are those of the reference: multiplications and additions are not contracted (`OPTIONS`); a
division is `div_rn`, which rounds correctly; rounding to whole numbers is one exact addition and subtraction;
subnormals are kept; maxima are those of integers; and no sum of floats depends on how work is divided, but for
a norm.
"""
