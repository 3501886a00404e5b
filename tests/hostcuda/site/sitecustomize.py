"""Give this process the emulated CUDA device, if HOSTCUDA names its libraries (tests/hostcuda/build.py)."""

import os
import sys

if os.environ.get("HOSTCUDA") and "torch" not in sys.modules:
    import hostcuda

    hostcuda.install_before_torch()
