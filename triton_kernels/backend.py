import os
def backend_of(tensor):
    mode = os.environ.get("MEGARL_KERNELS", "auto")
    return mode if mode != "auto" else ("triton" if tensor.is_cuda else "torch")
