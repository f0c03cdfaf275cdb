"""Operators of the `fxpasses::` namespace, registered through torch.library.

Nothing here imports `fxpasses`. An operator comes with schema, fake implementation and a reference in plain
PyTorch; faster implementations for a device stand behind the same schema (`custom_ops.kernels`). The dense
all-reduce needs no operator of its own: what it does, Inductor fuses.

    quantise, requantise, dequantise    int8 and int4 with a scale per group    `custom_ops.quantise`
    encode16, decode16                  fp16 and bf16 with a scale per shard    `custom_ops.wire16`
    topk_encode, topk_decode            the largest elements                    `custom_ops.topk`
    seal, broken                        checksums                               `custom_ops.checksum`
    unscale                             factor, finite or not, norm             `custom_ops.gradients`
    strike                              a damaged element                       `custom_ops.faults`

Importing a module registers its operators; this package alone loads no torch.
"""
