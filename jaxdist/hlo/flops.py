"""The FLOPs of an instruction, which are 2 for each multiply-add of a dot or convolution.

Element-wise operations and reductions are left out, as in every definition of model FLOPs.
Products with padding and with the zeros of a dilated input are not counted, as in XLA's analysis:
XLA:TPU writes batched dots as convolutions with padding or dilation.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

import numpy as np

from jaxdist.hlo.parse import ArrayShape, Computation, Instruction

_DIM_LABELS = re.compile(r"\bdim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_WINDOW_FIELDS = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_STATED = re.compile(r'"flops":"?(\d+)')
# The convolution's input, kernel and output for each cuDNN direction, as indices into the arrays
# (result, operand 0, operand 1).
_CUDNN = {
    "__cudnn$convForward": (1, 2, 0),
    "__cudnn$convBiasActivationForward": (1, 2, 0),
    "__cudnn$convBackwardInput": (0, 2, 1),
    "__cudnn$convBackwardFilter": (1, 0, 2),
}


def instruction_flops(instruction: Instruction, computation: Computation) -> int:
    """Return the FLOPs of an instruction, without the FLOPs of computations that it calls.

    Args:
      instruction: the instruction of an HLO program.
      computation: the computation that contains the instruction.
    """
    if instruction.opcode in ("dot", "ragged-dot"):
        left = computation.operand_shapes(instruction)[0][0]
        return _dot(instruction.shapes[0], left, instruction.numbers("lhs_contracting_dims"))
    if instruction.opcode == "convolution":
        shapes = [instruction.shapes[0], *_operands(instruction, computation)]
        return _convolution(instruction.attributes, shapes[1], shapes[2], shapes[0])
    if instruction.opcode == "custom-call":
        return _custom_call(instruction, computation)
    return 0


def _operands(instruction: Instruction, computation: Computation) -> list[ArrayShape]:
    return [shapes[0] for shapes in computation.operand_shapes(instruction) if shapes]


def _dot(result: ArrayShape, left: ArrayShape, contracting: tuple[int, ...]) -> int:
    return 2 * result.elements * math.prod(left.dims[dim] for dim in contracting)


def _custom_call(instruction: Instruction, computation: Computation) -> int:
    """Return the FLOPs of a library's dot or convolution, or the FLOPs that a kernel states.

    The result is 0 for any other custom call.
    """
    target = instruction.custom_call_target
    if target in _CUDNN:
        shapes = [instruction.shapes[0], *_operands(instruction, computation)]
        left, kernel, result = (shapes[role] for role in _CUDNN[target])
        return _convolution(instruction.attributes, left, kernel, result)
    if contracting := _CONTRACTING.search(instruction.attributes):
        dims = tuple(int(word) for word in re.findall(r"\d+", contracting[1]))
        return _dot(instruction.shapes[0], _operands(instruction, computation)[0], dims)
    if target == "__onednn$matmul":
        # oneDNN writes no contracted dims: it always contracts the last dim of the left operand.
        left = _operands(instruction, computation)[0]
        return _dot(instruction.shapes[0], left, (len(left.dims) - 1,))
    stated = _STATED.search(instruction.attributes)
    return int(stated[1]) if stated else 0


def _convolution(attributes: str, left: ArrayShape, kernel: ArrayShape, result: ArrayShape) -> int:
    labels = _DIM_LABELS.search(attributes)
    assert labels, f"no dim_labels in {attributes[:120]!r}"
    window = _WINDOW.search(attributes)
    found = re.findall(r"(\w+)=([\dx_\-]+)", window[1]) if window else []
    fields = {name: text.split("x") for name, text in found}
    spatial = [label for label in labels[3] if label.isdigit()]
    pairs = 1
    for label in sorted(spatial, key=int):
        number = int(label)
        pairs *= valid_pairs(
            left.dims[labels[1].index(label)],
            kernel.dims[labels[2].index(label)],
            result.dims[labels[3].index(label)],
            *(
                int(fields[name][number].split("_")[0]) if name in fields else default
                for name, default in _WINDOW_FIELDS.items()
            ),
        )
    batch_feature = (result.dims[labels[3].index(label)] for label in "bf")
    return 2 * pairs * kernel.dims[labels[2].index("i")] * math.prod(batch_feature)


@lru_cache(maxsize=4096)
def valid_pairs(
    size: int, kernel: int, result: int, stride: int, pad: int, dilate: int, kernel_dilate: int
) -> int:
    """Count the pairs (output, kernel position), along a dim, whose product reads an input element.

    A pair that reads padding, or a zero of a dilated input, does not count.

    Args:
      size, kernel, result: the sizes of the input, the kernel and the output along the dim.
      stride, pad: the stride, and the padding before the input.
      dilate, kernel_dilate: the dilation of the input and of the kernel.

    >>> valid_pairs(28, 3, 28, 1, 1, 1, 1)  # padding "same": at each end, one pair reads padding
    82
    """
    starts = np.arange(result) * stride - pad
    count = 0
    for offset in range(kernel):
        reached = starts + offset * kernel_dilate
        inside = (reached >= 0) & (reached < (size - 1) * dilate + 1) & (reached % dilate == 0)
        count += int(inside.sum())
    return count
