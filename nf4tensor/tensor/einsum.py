"""`torch.einsum` of a tensor and a 4-bit weight, as one product of matrices.

What it can't express as such a product (sums and diagonals of the weight, three operands) decodes,
as any other operation does.
"""

from dataclasses import dataclass
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from nf4tensor.tensor import fallback
from nf4tensor.tensor.dispatch import overrides
from nf4tensor.tensor.linear import is_weight, multiply
from nf4tensor.tensor.nf4_tensor import NF4Tensor


@dataclass
class _Equation:
    """Letters of `input, weight -> output`, weight being `[*lead, row, column]`."""

    input: str
    weight: str
    output: str

    @property
    def summed(self) -> str:
        return "".join(letter for letter in self.weight[-2:] if letter not in self.output)

    @property
    def kept(self) -> str:
        return "".join(letter for letter in self.weight[-2:] if letter in self.output)

    @property
    def rest(self) -> str:
        return "".join(letter for letter in self.input if letter not in self.weight)

    def is_product(self) -> bool:
        """Tell whether this is one product of matrices, in a batch of them."""
        terms = (self.input, self.weight, self.output)
        return (
            all(len(set(term)) == len(term) and "." not in term for term in terms)
            and len(self.summed) == len(self.kept) == 1
            and self.summed in self.input
            and self.kept not in self.input
            and set(self.output) == {*self.weight[:-2], *self.rest, self.kept}
        )


@overrides(torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    product = _as_product(equation, operands)
    if product is not None:
        return _multiply(*product)
    # Not left to torch, which would look at a weight in ways that cut its rows.
    fallback.warn_decoded(f"einsum of {equation!r}")
    return torch.einsum(
        equation, *(t.dequantize() if isinstance(t, NF4Tensor) else t for t in operands)
    )


def _as_product(
    equation: Any, operands: tuple[Any, ...]
) -> tuple[_Equation, Tensor, NF4Tensor] | None:
    """Return what to multiply, or None where it is no product of a tensor and a weight."""
    left, arrow, output = str(equation).replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2 or len(operands) != 2:
        return None
    if is_weight(operands[0]):
        operands, terms = operands[::-1], terms[::-1]
    input, weight = operands
    if isinstance(input, NF4Tensor) or not is_weight(weight):
        return None
    num_unnamed = input.dim() - len(terms[0].replace("...", ""))
    unused = [letter for letter in ascii_letters if letter not in equation]
    unnamed = "".join(unused[: max(num_unnamed, 0)])
    letters = _Equation(terms[0].replace("...", unnamed), terms[1], output.replace("...", unnamed))
    fits = len(letters.input) == input.dim() and len(letters.weight) == weight.dim()
    if not fits or not letters.is_product():
        return None
    sizes = dict(zip(letters.weight, weight.shape, strict=True))
    if any(sizes.get(k, n) != n for k, n in zip(letters.input, input.shape, strict=True)):
        return None
    return letters, input, weight


def _multiply(letters: _Equation, input: Tensor, weight: NF4Tensor) -> Tensor:
    sizes = dict(zip(letters.input, input.shape, strict=True))
    lead = letters.weight[:-2]
    shared = [letter for letter in lead if letter in letters.input]
    order = [*shared, *letters.rest, letters.summed]
    input = input.permute([letters.input.index(letter) for letter in order])
    rest = [sizes[letter] for letter in letters.rest]
    if lead:
        batch = [sizes.get(letter, 1) for letter in lead]
        input = input.reshape(*batch, prod(rest), sizes[letters.summed])
    output = multiply(input, weight, transposed=letters.summed == letters.weight[-1])
    output = output.reshape(*weight.shape[:-2], *rest, output.shape[-1])
    order = [*lead, *letters.rest, letters.kept]
    return output.permute([order.index(letter) for letter in letters.output])
