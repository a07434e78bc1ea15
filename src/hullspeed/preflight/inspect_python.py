"""Run by the engine's own interpreter: print what it is and holds, as one JSON line.

Only the standard library, so that it runs in any environment. torch is imported here, in a process
of its own, because a broken build may not raise but end the process.
"""

import importlib.metadata
import json
import platform
import re
import sys
from typing import Any


def packages() -> dict[str, str]:
    """Normalised name to version of every distribution."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def torch_build() -> dict[str, Any]:
    """Facts of the torch build, after importing it."""
    import torch  # noqa: PLC0415

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "cuda_available": torch.cuda.is_available(),
        "arch_list": torch.cuda.get_arch_list(),
        "fp16_linear": hasattr(torch, "fbgemm_pack_gemm_matrix_fp16")
        and "fbgemm" in torch.backends.quantized.supported_engines,
    }


def main() -> None:
    """Two lines: the interpreter first, so that it survives a torch that kills the process."""
    held = packages()
    python = {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "packages": held,
        "glibc": platform.libc_ver()[1],
    }
    print(json.dumps(python), flush=True)  # noqa: T201
    if "torch" in held:
        print(json.dumps(torch_build()), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
