"""Stack: everything the gate looks at, as plain data. Rules read this and nothing else."""

from __future__ import annotations

import msgspec


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """The torch build as it reports itself after import.

    Attributes:
        version: With its local part, e.g. ``2.13.0+cpu``.
        cuda: CUDA version of the build, ``None`` for a CPU build.
        hip: ROCm version of the build.
        imports: Whether ``import torch`` succeeded; ``error`` says why not.
        cuda_available: ``torch.cuda.is_available()``.
        arch_list: Compiled GPU targets, e.g. ``sm_90``.
        fp16_linear: Whether FBGEMM's packed fp16 matrix product exists.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    imports: bool = True
    error: str = ""
    cuda_available: bool = False
    arch_list: tuple[str, ...] = ()
    fp16_linear: bool = False


class Python(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's interpreter and its packages.

    Attributes:
        packages: Normalised distribution name to version.
    """

    version: str
    executable: str = ""
    implementation: str = "CPython"
    packages: dict[str, str] = {}
    torch: Torch | None = None


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """The processor.

    Attributes:
        usable_cores: Cores this process may use: the smaller of affinity and cgroup quota.
        affinity_cores: Cores in the scheduling affinity.
        quota_cores: Cores' worth of time the cgroup grants; ``None`` without a quota.
        flags: Instruction sets as the kernel names them.
    """

    model: str = ""
    arch: str = "x86_64"
    logical_cores: int = 1
    affinity_cores: int = 1
    quota_cores: float | None = None
    flags: frozenset[str] = frozenset()

    @property
    def usable_cores(self) -> int:
        """Whole cores that work for this process, at least one."""
        if self.quota_cores is None:
            return max(1, self.affinity_cores)
        return max(1, min(self.affinity_cores, int(self.quota_cores + 0.5)))


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Main memory in bytes; ``limit_bytes`` is the cgroup's, ``None`` without one."""

    total_bytes: int = 0
    available_bytes: int = 0
    limit_bytes: int | None = None
    limit_used_bytes: int = 0


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The file system that holds models and compiled kernels."""

    path: str = ""
    free_bytes: int = 0
    writable: bool = True


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the operating system.

    Attributes:
        port_error: Why the asked port cannot be bound; empty when it can.
        shm_bytes: Size of ``/dev/shm``; ``None`` where there is none.
        nofile: Soft limit of open files; ``memlock_bytes`` ``None`` means unlimited.
    """

    os: str = "linux"
    kernel: str = ""
    glibc: str = ""
    port_error: str = ""
    shm_bytes: int | None = None
    nofile: int = 1024
    memlock_bytes: int | None = None
    offline: bool = False
    env: dict[str, str] = {}


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory on a GPU."""

    pid: int
    name: str = ""
    used_bytes: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One device as NVML reports it.

    Attributes:
        compute_capability: e.g. ``9.0``.
        mig: Whether MIG mode is on; ``mig_slices`` are the memory sizes of its instances.
        ecc_uncorrected: Uncorrected errors since the driver loaded.
        remap_pending: A row remap waits for a reset.
        compute_mode: ``default``, ``exclusive`` or ``prohibited``.
        fabric: NVSwitch fabric state: ``none`` (no fabric), ``ready``, ``pending`` or an error.
    """

    index: int
    name: str
    uuid: str = ""
    compute_capability: str
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    mig: bool = False
    mig_slices: tuple[int, ...] = ()
    ecc_uncorrected: int = 0
    remap_pending: bool = False
    compute_mode: str = "default"
    fabric: str = "none"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability as numbers."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor or 0)

    @property
    def datacenter(self) -> bool:
        """Whether the device takes CUDA forward-compatibility packages (never GeForce)."""
        return not any(word in self.name for word in ("GeForce", "TITAN"))


class Nvidia(msgspec.Struct, frozen=True, kw_only=True):
    """The driver and its devices.

    Attributes:
        error: Why NVML does not answer; empty when it does.
        driver: e.g. ``535.104.05``.
        driver_cuda: Highest CUDA the driver offers by itself, e.g. ``12.2``.
    """

    error: str = ""
    driver: str = ""
    driver_cuda: str = ""
    gpus: tuple[Gpu, ...] = ()


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the checkpoint; ``sha256`` only when it was asked for or is recorded."""

    name: str
    size_bytes: int
    sha256: str = ""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint's headers say.

    Attributes:
        found: Whether the files are on this machine.
        error: Why they cannot be read; empty when they can.
        unsupported: Why nobody here can size or run the architecture; empty when known.
        missing_files: Shards that the index names and that are not there.
        family: As ``ModelArch.family``: ``llama``, ``qwen3``, ``qwen3_5``, ...
        quant: Weight format: ``none``, ``fp8_block``, ``awq``, ``gguf``, ...
        heads: What tensor parallelism must divide: ``query``, ``key_value``, ``state_key``,
            ``state_value``; absent where the architecture has none.
    """

    source: str = ""
    revision: str = ""
    path: str = ""
    found: bool = True
    error: str = ""
    unsupported: str = ""
    missing_files: tuple[str, ...] = ()
    files: tuple[ModelFile, ...] = ()
    family: str = ""
    dtype: str = "bf16"
    quant: str = "none"
    heads: dict[str, int] = {}
    layers: int = 0
    max_context_tokens: int = 0
    hybrid: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The whole stack, from processor to model."""

    python: Python
    cpu: Cpu = Cpu()
    memory: Memory = Memory()
    disk: Disk = Disk()
    system: System = System()
    nvidia: Nvidia | None = None
    model: Model = Model()
