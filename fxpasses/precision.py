"""Which operators may run in low precision: the table behind the pass `cast`.

    allow   products and convolutions: faster in low precision, and accumulated in fp32 inside
    deny    reductions, exponentials and powers, which lose too much or leave the range of fp16: as they were
    infer   elementwise operators: low where all that they read is low
    clear   operators that only move, select or draw values: wherever that spares casts

An operator that is in none of these lists is denied. The classes follow what autocast does (`aten/src/ATen/
autocast_mode.h`), stated for the smaller operators that compositions are made of.
"""

from __future__ import annotations

import fnmatch

import torch
from torch import fx

from fxpasses.patterns import partition, split

# By the words of options.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ALLOW, DENY, INFER, CLEAR = "allow", "deny", "infer", "clear"
CLASSES = (ALLOW, DENY, INFER, CLEAR)

_TABLE = {
    ALLOW: (
        "mm addmm bmm baddbmm addbmm addmv mv dot linear convolution convolution_backward "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"
    ),
    INFER: (
        "add sub mul div neg abs relu leaky_relu threshold_backward sigmoid sigmoid_backward tanh "
        "tanh_backward gelu gelu_backward silu silu_backward hardtanh hardtanh_backward hardswish "
        "hardswish_backward hardsigmoid hardsigmoid_backward elu elu_backward leaky_relu_backward erf where "
        "masked_fill maximum minimum clamp clamp_min clamp_max fma native_dropout native_dropout_backward "
        "sign"
    ),
    CLEAR: (
        "view reshape _unsafe_view permute t transpose expand squeeze unsqueeze slice select split "
        "split_with_sizes unbind cat stack clone alias detach contiguous getitem flip roll repeat "
        "as_strided constant_pad_nd slice_backward select_backward unfold max_pool2d_with_indices "
        "_low_memory_max_pool_with_offsets index index_select gather empty new_empty "
        "empty_like bernoulli"
    ),
    # Listed for the reader: what is nowhere is denied as well.
    DENY: (
        "exp expm1 log log1p log2 pow rsqrt reciprocal sqrt sum mean var var_mean std cumsum cumprod prod "
        "amax amin softmax _softmax _softmax_backward_data log_softmax _log_softmax "
        "_log_softmax_backward_data logsumexp norm linalg_vector_norm native_layer_norm "
        "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm "
        "native_batch_norm_backward embedding embedding_dense_backward index_put index_add scatter_add "
        "nll_loss_forward nll_loss_backward erfinv cos sin atan acos asin tan cosh sinh"
    ),
}
TABLE: dict[str, str] = {name: kind for kind, names in _TABLE.items() for name in names.split()}

# Positions of arguments that stay fp32 although the operator is allowed: statistics that it returned as fp32.
KEEPS_FP32 = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": (5,),
    "_scaled_dot_product_flash_attention_backward": (5,),
    "_scaled_dot_product_efficient_attention_backward": (6,),
    "_scaled_dot_product_cudnn_attention_backward": (5,),
}

# Operators that make memory of which only the shape counts.
UNSET = frozenset(["empty", "new_empty", "empty_like"])

# Elementwise operators that bring inputs of different dtypes to the wider one themselves.
PROMOTES = frozenset(["add", "sub", "mul", "div", "maximum", "minimum", "where"])

# Elementwise operators for which it is the same whether their input or their result is rounded.
COMMUTES = frozenset(["relu", "neg", "abs"])

# Operators whose result is the same whether a low value is brought to fp32 first.
COMPARES = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite"])

Rules = tuple[tuple[str, str], ...]


def parse_rules(text: str) -> Rules:
    """`"aten.exp=infer;head.*=deny"` → pairs of pattern and class.

    Raises:
        ValueError: for what is no such pair.
    """
    rules: list[tuple[str, str]] = []
    for item in filter(None, (part.strip() for part in split(text, ";"))):
        pattern, equals, kind = (part.strip() for part in partition(item, "="))
        if not (pattern and equals) or kind not in CLASSES:
            raise ValueError(
                f"option 'precision_rules': got {item!r}; expected pattern=class, class one of "
                f"{', '.join(CLASSES)}"
            )
        rules.append((pattern, kind))
    return tuple(rules)


def operator_name(node: fx.Node) -> str:
    """`aten.add.Tensor` → `add`."""
    target = node.target
    return str(getattr(target, "_opname", None) or getattr(target, "__name__", target))


def is_cast(node: fx.Node) -> bool:
    return operator_name(node) in ("convert_element_type", "_to_copy")


def is_batch_norm(node: fx.Node) -> bool:
    """Whether it is a batch norm in the forward, or part of one that has been decomposed."""
    names = (operator_name(node), str(node.meta.get("original_aten", "")))
    return any("batch_norm" in name and "backward" not in name for name in names)


def class_of(node: fx.Node, rules: Rules = ()) -> str:
    """The class of a node: by the last rule whose pattern is its operator (`aten.softmax`) or matches the
    qualified name of its module (`blocks.*.norm`), else by the table.
    """
    name = operator_name(node)
    modules = modules_of(node)
    for pattern, kind in reversed(rules):
        if pattern == f"aten.{name}" or any(fnmatch.fnmatchcase(m, pattern) for m in modules):
            return kind
    return TABLE.get(name, DENY)


def modules_of(node: fx.Node) -> list[str]:
    """Qualified names of the modules that a node belongs to, the outermost first."""
    return [name for name, _ in calls_of(node)]


def calls_of(node: fx.Node) -> list[tuple[str, int]]:
    """The same, each with the number of the module's call, from 0."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    pairs = [(path, key.partition("@")[2]) for key, (path, _) in stack.items()]
    return [(_qualified(path), int(number or 0)) for path, number in pairs]


def _qualified(path: str) -> str:
    """`L['self']._modules['blocks']._modules['0']` or `L['self'].blocks.0` → `blocks.0`."""
    flat = path.replace("._modules['", ".").replace("']", "").replace("['", ".")
    parts = [part for part in flat.split(".") if part not in ("_orig_mod", "")]
    return ".".join(parts[2:]) if parts[:1] in (["L"], ["G"]) else ".".join(parts)
