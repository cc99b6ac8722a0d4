"""The kernel of `kernels`, in the form that triton reads: a function of a module that imports triton.

Importing this file imports triton; `kernels` does so when the first launch comes. Not a line more than the kernel:
triton compiles the text of the function, and takes no annotations but its own. Indices are 32 bits wide, because a
division of 64 bits costs as much as the copy; offsets are 64.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def move_pieces(
    table: tl.tensor,
    pieces: tl.tensor,
    tensors: tl.tensor,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_ENGINE: tl.constexpr,
) -> None:
    """Copy piece p of tensor t, words of type `WORD`, for every (p, t) of the grid's first axis.

    `table` i64: words of a piece; lengths of axes 1, 2, 3 (axis 0 is what is left); byte strides of axes 0 to 3, in the
    pool and in the tensor by turns; from entry 12 on the addresses in the pool and in the tensors, one a tensor; the
    offsets in the pool and in the tensors, one a piece.
    """
    row = tl.program_id(0)
    piece = row % pieces
    tensor = row // pieces
    addresses = table + 12
    offsets = addresses + 2 * tensors
    ours = tl.load(addresses + tensor) + tl.load(offsets + piece)
    theirs = tl.load(addresses + tensors + tensor) + tl.load(offsets + pieces + piece)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.load(table).to(tl.int32)
    length = tl.load(table + 3).to(tl.int32)
    at = (index % length).to(tl.int64)
    ours += at * tl.load(table + 10)
    theirs += at * tl.load(table + 11)
    index = index // length
    length = tl.load(table + 2).to(tl.int32)
    at = (index % length).to(tl.int64)
    ours += at * tl.load(table + 8)
    theirs += at * tl.load(table + 9)
    index = index // length
    length = tl.load(table + 1).to(tl.int32)
    at = (index % length).to(tl.int64)
    ours += at * tl.load(table + 6)
    theirs += at * tl.load(table + 7)
    at = (index // length).to(tl.int64)
    ours += at * tl.load(table + 4)
    theirs += at * tl.load(table + 5)
    pool = ours.to(tl.pointer_type(WORD))
    engine = theirs.to(tl.pointer_type(WORD))
    if TO_ENGINE:
        tl.store(engine, tl.load(pool, mask=inside), mask=inside)
    else:
        tl.store(pool, tl.load(engine, mask=inside), mask=inside)
