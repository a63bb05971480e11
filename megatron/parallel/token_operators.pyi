"""The C++ extension behind token_kernels.py, which checks tensors and passes their addresses."""

def rms_norm(x: int, weight: int, result: int, rows: int, width: int, epsilon: float, is_bfloat16: bool, /) -> None: ...
def swiglu(gate_up: int, result: int, rows: int, width: int, is_bfloat16: bool, /) -> None: ...
def rotate(
    x: int, cos: int, sin: int, result: int, rows: int, stride: int, heads: int, size: int, is_bfloat16: bool, /
) -> None: ...
def attend(
    qkv: int,
    cos: int,
    sin: int,
    slopes: int,
    positions: int,
    keys: int,
    values: int,
    context: int,
    rows: int,
    kv_heads: int,
    group: int,
    head_size: int,
    places: int,
    is_bfloat16: bool,
) -> None: ...
