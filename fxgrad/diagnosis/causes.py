"""Why an operation turns finite numbers into NaN or Inf, and the idiom that mends it."""

from __future__ import annotations

from dataclasses import dataclass

_SAFE = "make the input safe first, then select: safe = torch.where(ok, x, 1.0); torch.where(ok, f(safe), 0.0)"


@dataclass(frozen=True, slots=True)
class Cause:
    """The usual cause, and what to write instead."""

    why: str
    mend: str


#: By kind: when the values themselves become non-finite in the forward pass.
FORWARD: dict[str, Cause] = {
    "log": Cause("log of 0 is -inf, of a negative number NaN",
                 "clamp the input (x.clamp(min=1e-12)) or use log_softmax, logsigmoid, log1p"),
    "log_softmax": Cause("a row of nothing but -inf has no softmax", "mask so that every row keeps an entry"),
    "logsumexp": Cause("the sum over nothing but -inf is -inf, and its gradient NaN",
                       "keep unreachable states at a large negative number such as -1e30 instead of -inf"),
    "softmax": Cause("a row that is masked out whole, nothing but -inf, has no softmax",
                     "use a finite mask value (torch.finfo(dtype).min), or leave one entry of each row unmasked"),
    "attention": Cause("a query with every key masked has no softmax",
                       "unmask one key of such rows, drop them beforehand, or use need_weights=False"),
    "div": Cause("division by zero", "clamp the denominator (count.clamp(min=1)) or add an eps to it"),
    "std": Cause("the standard deviation of one sample with Bessel's correction is 0/0",
                 "use correction=0, or skip the statistic for a single sample"),
    "var": Cause("the variance of one sample with Bessel's correction is 0/0",
                 "use correction=0, or skip the statistic for a single sample"),
    "mean": Cause("the mean over no entries is 0/0", "check that the selection is not empty"),
    "sqrt": Cause("the root of a negative number is NaN", "clamp the input: x.clamp(min=eps).sqrt()"),
    "rsqrt": Cause("1/sqrt of 0 is Inf, of a negative number NaN", "add an eps inside of the root"),
    "pow": Cause("a negative base with a fractional exponent is NaN, 0 with a negative one Inf",
                 "clamp the base: x.clamp(min=eps).pow(p)"),
    "exp": Cause("exp overflows above 88 in float32 (11 in float16)",
                 "subtract the maximum first, clamp the input, or use logsumexp, softmax, softplus"),
    "expm1": Cause("exp overflows above 88 in float32", "clamp the input"),
    "sinh": Cause("sinh overflows above 89 in float32", "clamp the input"),
    "cosh": Cause("cosh overflows above 89 in float32", "clamp the input"),
    "acos": Cause("outside of [-1, 1] there is no arc cosine", "clamp: x.clamp(-1 + eps, 1 - eps), or use atan2"),
    "asin": Cause("outside of [-1, 1] there is no arc sine", "clamp: x.clamp(-1 + eps, 1 - eps), or use atan2"),
    "acosh": Cause("below 1 there is no acosh", "clamp the input: x.clamp(min=1 + eps)"),
    "atanh": Cause("at 1 and -1 atanh is infinite", "clamp: x.clamp(-1 + eps, 1 - eps)"),
    "logit": Cause("at 0 and 1 logit is infinite", "pass eps=1e-6 to torch.logit"),
    "erfinv": Cause("at 1 and -1 erfinv is infinite", "clamp: x.clamp(-1 + eps, 1 - eps)"),
    "matmul": Cause("0 times an infinite entry is NaN, or the sum overflowed", "look at the size of the operands"),
    "mul": Cause("0 times an infinite entry is NaN, or the product overflowed",
                 "replace infinite entries with torch.where first: multiplying by a mask of zeros leaves NaN"),
    "sub": Cause("Inf minus Inf is NaN", "keep masks finite (torch.finfo(dtype).min)"),
    "add": Cause("Inf plus -Inf is NaN", "keep masks finite (torch.finfo(dtype).min)"),
    "linear": Cause("the sum overflowed", "look at the size of the input and the weight"),
    "conv": Cause("the sum overflowed", "look at the size of the input and the weight"),
    "layer_norm": Cause("a constant row has variance 0, and eps is 0 or rounds to 0 in this dtype",
                        "use an eps that the dtype holds (1e-5)"),
    "batch_norm": Cause("variance 0 with an eps of 0, or running statistics that are non-finite",
                        "use an eps of 1e-5; check the running statistics"),
    "normalize": Cause("a vector of norm 0 with an eps of 0", "pass an eps that the dtype holds"),
    "cosine_similarity": Cause("a vector of norm 0 with an eps of 0", "pass an eps that the dtype holds"),
    "inverse": Cause("the matrix is singular", "add a multiple of the identity, or use lstsq or pinv"),
    "solve": Cause("the matrix is singular", "add a multiple of the identity"),
    "logdet": Cause("the matrix is singular or has a negative determinant", "add a multiple of the identity"),
    "cross_entropy": Cause("every target is ignored, so that the mean is 0/0",
                           "skip such batches, or use reduction='sum' over a clamped count"),
    "nll_loss": Cause("every target is ignored, so that the mean is 0/0",
                      "skip such batches, or use reduction='sum' over a clamped count"),
    "kl_div": Cause("log of 0 in the target or input", "pass log_target=True and log-probabilities"),
}  # fmt: skip

#: By kind: when the values are finite and the gradient isn't.
BACKWARD: dict[str, Cause] = {
    "sqrt": Cause("the derivative of sqrt at 0 is Inf, and 0 times Inf is NaN",
                  "put an eps inside of the root: (x + 1e-12).sqrt(); clamping after the root doesn't help"),
    "norm": Cause("the derivative of a norm at the zero vector is 0/0 or Inf", "add an eps inside of the root"),
    "rsqrt": Cause("the derivative of 1/sqrt near 0 is Inf", "put an eps inside of the root"),
    "pow": Cause("a power with exponent below 1 has an infinite derivative at 0",
                 "clamp or shift the base: (x + eps).pow(p); " + _SAFE),
    "log": Cause("the derivative of log at 0 is Inf; a mask behind it makes NaN of that", _SAFE),
    "div": Cause("the derivative of a division by 0 is NaN, whatever is selected behind it", _SAFE),
    "mul": Cause("a factor is Inf, or the product overflowed", "look at the size of both factors"),
    "std": Cause("the derivative of a standard deviation of a constant, or of a single sample, is 0/0",
                 "add an eps: (var + eps).sqrt(), with correction=0 where there may be a single sample"),
    "acos": Cause("the derivative of acos at 1 and -1 is infinite",
                  "clamp: x.clamp(-1 + 1e-7, 1 - 1e-7), or use atan2(norm(cross), dot)"),
    "asin": Cause("the derivative of asin at 1 and -1 is infinite",
                  "clamp: x.clamp(-1 + 1e-7, 1 - 1e-7), or use atan2"),
    "acosh": Cause("the derivative of acosh at 1 is infinite", "clamp the input: x.clamp(min=1 + eps)"),
    "atanh": Cause("the derivative of atanh at 1 is infinite", "clamp: x.clamp(-1 + eps, 1 - eps)"),
    "exp": Cause("exp overflowed, and 0 times Inf is NaN", "clamp the input of exp, or subtract the maximum first"),
    "logsumexp": Cause("a column of nothing but -inf has no softmax, which is the gradient of logsumexp",
                       "keep unreachable states at a large negative number such as -1e30 instead of -inf"),
    "softmax": Cause("a row that is masked out whole has no softmax",
                     "use a finite mask value (torch.finfo(dtype).min), or leave one entry of each row unmasked"),
    "attention": Cause("a query with every key masked has no softmax",
                       "unmask one key of such rows, drop them beforehand, or use need_weights=False"),
    "cumprod": Cause("the derivative of a product with zeros divides by them", "use logs and cumsum"),
    "hypot": Cause("the derivative of hypot at (0, 0) is 0/0", "add an eps: (x * x + y * y + eps).sqrt()"),
    "atan2": Cause("the derivative of atan2 at (0, 0) is 0/0", "add an eps to one argument"),
    "cdist": Cause("the distance of a point to itself has no derivative", "mask the diagonal before the root"),
    "pairwise_distance": Cause("the distance of a point to itself has no derivative", "pass an eps"),
    "eigh": Cause("two equal eigenvalues make the derivative of the eigenvectors 1/0",
                  "add small distinct values to the diagonal, or use the eigenvalues only"),
    "eig": Cause("two equal eigenvalues make the derivative of the eigenvectors 1/0",
                 "add small distinct values to the diagonal"),
    "svd": Cause("two equal or vanishing singular values make the derivative 1/0",
                 "add small distinct values to the diagonal, or use svdvals"),
    "qr": Cause("a rank-deficient matrix has no derivative of its QR", "add a multiple of the identity"),
    "inverse": Cause("the matrix is close to singular", "add a multiple of the identity, or use lstsq"),
    "cholesky": Cause("the matrix is close to singular", "add a multiple of the identity"),
    "where": Cause("the gradient of the selected branch was non-finite already", _SAFE),
    "logit": Cause("the derivative of logit at 0 and 1 is infinite", "pass eps=1e-6 to torch.logit"),
    "erfinv": Cause("the derivative of erfinv at 1 and -1 is infinite", "clamp: x.clamp(-1 + eps, 1 - eps)"),
    "layer_norm": Cause("a constant row has variance 0 and eps is 0", "use an eps of 1e-5"),
    "batch_norm": Cause("a constant channel has variance 0 and eps is 0", "use an eps of 1e-5"),
}  # fmt: skip

_HALF = Cause(
    "the number left the range of its dtype", "use bfloat16 or float32 for this operation, or lower the loss scale"
)
_UNKNOWN = Cause("an input lies where the operation, or its derivative, has no finite value",
                 "look at its inputs at this step; clamp them before the operation")  # fmt: skip


def cause_of(kind: str, dtype: str, *, forward: bool, overflow: bool) -> Cause:
    """The usual cause for a kind of operation; ``overflow``: Inf came first, and the values are large."""
    if overflow and dtype == "float16":
        return _HALF
    return (FORWARD if forward else BACKWARD).get(kind) or (BACKWARD if forward else FORWARD).get(kind) or _UNKNOWN
