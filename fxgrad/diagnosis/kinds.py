"""What kind of operation a node is, whichever way the user wrote it: ``nn.ReLU``, ``F.relu``, ``x.relu_()``."""

from __future__ import annotations

from fxgrad.schema import Constant, Node

_MODULES = {
    "linear": "linear", "lazylinear": "linear", "bilinear": "linear", "nondynamicallyquantizablelinear": "linear",
    "crossentropyloss": "cross_entropy", "bcewithlogitsloss": "binary_cross_entropy_with_logits",
    "bceloss": "binary_cross_entropy", "mseloss": "mse_loss", "nllloss": "nll_loss", "logsigmoid": "logsigmoid",
    "multiheadattention": "attention", "embeddingbag": "embedding", "identity": "identity",
    "softmax2d": "softmax", "hardtanh": "clamp", "relu6": "relu6",
}  # fmt: skip
_SAME = {
    "addmm": "linear", "baddbmm": "matmul", "bmm": "matmul", "mm": "matmul", "mv": "matmul", "matmul": "matmul",
    "einsum": "matmul", "dot": "matmul", "tensordot": "matmul", "chain_matmul": "matmul",
    "scaled_dot_product_attention": "attention", "multi_head_attention_forward": "attention",
    "clip": "clamp", "clamp_min": "clamp", "clamp_max": "clamp", "hardtanh": "clamp", "threshold": "relu",
    "div": "div", "true_divide": "div", "reciprocal": "div", "concat": "cat", "concatenate": "cat",
    "arccos": "acos", "arcsin": "asin", "arccosh": "acosh", "arctanh": "atanh", "linalg_norm": "norm",
    "vector_norm": "norm", "linalg_vector_norm": "norm", "matrix_norm": "norm", "linalg_matrix_norm": "norm",
    "frobenius_norm": "norm", "special_logsumexp": "logsumexp", "special_expm1": "expm1", "special_log1p": "log1p",
    "special_log_softmax": "log_softmax", "special_softmax": "softmax", "softmin": "softmax",
    "gumbel_softmax": "softmax", "fix": "trunc", "sgn": "sign", "expit": "sigmoid", "special_expit": "sigmoid",
    "logsigmoid": "logsigmoid", "log_sigmoid": "logsigmoid", "linalg_eigh": "eigh", "linalg_svd": "svd",
    "linalg_inv": "inverse", "inv": "inverse", "linalg_solve": "solve", "linalg_cholesky": "cholesky",
    "linalg_qr": "qr", "linalg_det": "det", "slogdet": "logdet", "linalg_slogdet": "logdet", "std_mean": "std",
    "var_mean": "var", "float_power": "pow", "square": "pow", "rdiv": "div",
}  # fmt: skip

#: Losses that are 0 once every sample keeps its distance.
MARGINS = frozenset({
    "triplet_margin_loss", "triplet_margin_with_distance_loss", "margin_ranking_loss", "hinge_embedding_loss",
    "cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss", "tripletmarginloss",
    "tripletmarginwithdistanceloss", "marginrankingloss", "hingeembeddingloss", "cosineembeddingloss",
    "multimarginloss", "multilabelmarginloss",
})  # fmt: skip
#: Losses: what they send back shrinks as they are met.
LOSSES = frozenset({
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "ctc_loss", "gaussian_nll_loss", "poisson_nll_loss",
    "soft_margin_loss", "multilabel_soft_margin_loss", "l1loss", "smoothl1loss", "huberloss", "kldivloss", "ctcloss",
    "gaussiannllloss", "poissonnllloss", "softmarginloss", "multilabelsoftmarginloss", *MARGINS,
})  # fmt: skip
#: Operations whose derivative is zero wherever it exists.
PIECEWISE_CONSTANT = frozenset({
    "round", "sign", "floor", "ceil", "trunc", "heaviside", "floordiv", "floor_divide", "bernoulli", "poisson",
    "normal", "binomial",
})  # fmt: skip
#: Operations that select by their data, so that a branch gets zeros where it was not chosen.
SELECTING = frozenset({
    "where", "masked_fill", "getitem", "index", "index_select", "gather", "scatter", "scatter_add", "scatter_reduce",
    "index_add", "index_copy", "index_put", "index_fill", "masked_scatter", "setitem", "max_pool", "max", "min", "amax",
    "amin", "topk", "sort", "median", "take", "pad", "narrow", "embedding", "masked_select", "bincount", "tril", "triu",
})  # fmt: skip
#: Operations that scale by a weight, a constant or another value.
SCALING = frozenset({"linear", "conv", "matmul", "mul", "div", "bilinear", "external"})
#: Operations with a weight matrix whose scale is that of the init.
WEIGHTED = frozenset({
    "linear", "conv", "embedding", "lstmcell", "grucell", "rnncell", "lstm", "gru", "rnn", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell", "rnn_tanh", "rnn_relu",
})  # fmt: skip
#: Activations that have units to die.
RECTIFIERS = frozenset({"relu", "relu6", "clamp", "hardswish", "hardsigmoid"})
NORMS = frozenset({"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm"})
#: Operations that may turn finite gradients into zeros by themselves: these zeros tell nothing about the dtype.
MAKES_ZEROS = frozenset({
    "relu", "relu6", "clamp", "dropout", "max_pool", "max", "min", "amax", "amin", "maximum", "minimum", "where",
    "masked_fill", "getitem", "index", "index_select", "gather", "scatter", "pad", "embedding", "topk", "sort",
    "median", "mode", "round", "sign", "floor", "ceil", "trunc", "abs", "hardswish", "hardsigmoid", "hardshrink",
    "softshrink", "threshold", "tril", "triu", "setitem", "narrow", "split", "chunk", "unbind", "select",
    "fractional_max_pool", "adaptive_max_pool", "max_unpool", "fold", "unfold", "slice", "take", "masked_select",
    "attention", "leaky_relu", "mul", "interpolate", "upsample", "grid_sample", "nan_to_num", "zero",
})  # fmt: skip


def kind_of(node: Node) -> str:
    """The kind: an op word without dimension and in-place mark; ``"linear"``, ``"conv"``, ``"batch_norm"`` ..."""
    if node.op in ("placeholder", "output", "external"):
        return node.op
    if node.op == "call_module":
        return _of_module(node.module_type)
    word = node.key.rpartition("/")[2].partition("#")[0]
    return canonical(word)


def canonical(word: str) -> str:
    """One word for the spellings of one operation."""
    word = word.lower()
    if word.endswith("_") and not word.startswith("_"):
        word = word.rstrip("_")
    word = _SAME.get(word, word)
    for stem in ("conv_transpose", "conv", "adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "max_pool"):
        if word.startswith(stem) and word[len(stem) : len(stem) + 1] in {"", "1", "2", "3", "_"}:
            return "conv" if stem.startswith("conv") else stem
    if word.endswith("dropout") or word.startswith("dropout"):
        return "dropout"
    return word


def _of_module(kind: str) -> str:
    word = kind.lower()
    if word in _MODULES:
        return _MODULES[word]
    for stem, found in (
        ("lazy", ""), ("convtranspose", "conv"), ("conv", "conv"), ("batchnorm", "batch_norm"),
        ("syncbatchnorm", "batch_norm"), ("layernorm", "layer_norm"), ("groupnorm", "group_norm"),
        ("instancenorm", "instance_norm"), ("rmsnorm", "rms_norm"), ("adaptiveavgpool", "adaptive_avg_pool"),
        ("adaptivemaxpool", "adaptive_max_pool"), ("avgpool", "avg_pool"), ("maxpool", "max_pool"),
        ("logsoftmax", "log_softmax"), ("leakyrelu", "leaky_relu"),
    ):  # fmt: skip
        if word.startswith(stem):
            return found or _of_module(kind[len(stem) :])
    return canonical(word)


def constant(node: Node, *names: str) -> Constant | None:
    """The first constant of a node that goes by one of these names (``"args[1]"``, ``"min_val"``, ``"eps"``)."""
    for name in names:
        for found in node.constants:
            if found.argument in (name, f"kwargs['{name}']"):
                return found
    return None
