"""Tensors that a distributed optimizer saved flat: format fully_sharded_model_space of megatron-core 0.5 to 0.13.

Each tensor-parallel rank's part of a tensor [X, Y], of x rows and y columns, is a row of its own: the tensor is stored
as [X / x, Y / y, x * y], cut along the last dimension over the data-parallel ranks. Vectors stay as they are.

Source: NVIDIA/Megatron-LM, megatron/core/dist_checkpointing/strategies/torch.py, sharded_tensor_to_torch_sharded_tensor
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from megatron.weights.distributed.folder import DistributedFolder
from megatron.weights.huggingface_files import StoredTensor


def unflattened(
    files: DistributedFolder,
    key: str,
    shape: tuple[int, ...],
    index: tuple[int, ...],
    rows: tuple[int, int] | None = None,
) -> StoredTensor | None:
    """Return the tensor at `index` of one that is stored as it is, or flat; None: in neither way.

    `shape`: of the whole tensor, with its leading dimensions. `rows`: first and end of its rows, if not all.
    """
    held = files.tensors[key].shape
    # the usual case, of every release since 0.14
    if held == shape:
        return files.stored(key, index, rows) if len(index) < len(shape) else None
    # numbers of parts by dimension, and the elements of each
    parts = held[:-1]
    if len(parts) != len(shape) or any(length % count for length, count in zip(shape, parts, strict=True)):
        return None
    part_shape = [length // count for length, count in zip(shape, parts, strict=True)]
    matrix = shape[len(index) :]
    # a layer or an expert has parts of its own
    if math.prod(part_shape) != held[-1] or len(matrix) != 2 or any(size != 1 for size in part_shape[: len(index)]):
        return None
    # padding of the vocabulary is in the parts, and is not read
    begin, end = rows or (0, matrix[0])
    window = partial(_window, files, key, index, (part_shape[-2], part_shape[-1]), begin)

    def read_rows(first: int, last: int) -> Tensor:
        return window(first, last, (0, matrix[1]))

    tensor = files.tensors[key]
    return StoredTensor(tensor.chunks[0].at.path, (end - begin, matrix[1]), tensor.dtype, read_rows, window=window)


def _window(
    files: DistributedFolder,
    key: str,
    index: tuple[int, ...],
    part: tuple[int, int],
    begin: int,
    first: int,
    last: int,
    columns: tuple[int, int],
) -> Tensor:
    """Return columns of the rows [first, last) behind `begin`. `part`: rows and columns of a rank's part."""
    height, width = part
    result = torch.empty((last - first, columns[1] - columns[0]), dtype=files.tensors[key].dtype)
    # by bands of rows, each of which lies in one row of parts
    row = begin + first
    while row < begin + last:
        band, top = divmod(row, height)
        count = min(height - top, begin + last - row)
        for number in range(columns[0] // width, -(-columns[1] // width)):
            # rows of one part follow each other
            box = (*index, band, number)
            # one stretch of the files, or of a few data-parallel ranks' files
            flat = files.read(key, (*box, top * width), (*(at + 1 for at in box), (top + count) * width))
            left, right = max(columns[0], number * width), min(columns[1], (number + 1) * width)
            # the columns of this part that are wanted
            target = result[row - begin - first :, left - columns[0] : right - columns[0]][:count]
            target.copy_(flat.view(count, width)[:, left - number * width : right - number * width])
        row += count
    return result
