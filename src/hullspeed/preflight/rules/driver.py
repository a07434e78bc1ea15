"""The driver against the CUDA version of the torch build.

Within one CUDA major a build runs on any driver of that major (minor-version compatibility);
across majors only on data-centre GPUs with NVIDIA's forward-compatibility package.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from hullspeed.findings import Finding
from hullspeed.preflight import tables
from hullspeed.preflight.case import Case, below
from hullspeed.preflight.codes import found


def new_enough(case: Case) -> Iterator[Finding]:
    """PF036 and PF038: a driver below the major's minimum, and a way out that there is not."""
    seen = _driver_and_build(case)
    if seen is None or not _too_old(*seen):
        return
    driver, build = seen
    needs = tables.cuda().major_minimum[build.partition(".")[0]]
    offers = tables.cuda().offered_by(driver) or "below 12.0"
    consumer = next((gpu for gpu in case.used_gpus if not gpu.datacenter), None)
    if _compat_wanted(case):
        if consumer is not None:
            yield found("PF038", gpu=consumer.name, needs=needs, offers=offers)
        elif not _compat_possible(driver, build):
            yield _too_old_finding(case, driver, build, needs, offers)
        return
    yield _too_old_finding(case, driver, build, needs, offers)


def minor_compatibility(case: Case) -> Iterator[Finding]:
    """PF037: an older driver of the same major."""
    seen = _driver_and_build(case)
    if seen is None or _too_old(*seen):
        return
    driver, build = seen
    needs = tables.cuda().needs_driver(build)
    if below(driver, needs):
        offers = tables.cuda().offered_by(driver)
        yield found("PF037", driver=driver, offers=offers, cuda=build, needs=needs)


def torch_sees_cuda(case: Case) -> Iterator[Finding]:
    """PF041: everything fits and CUDA still does not start."""
    seen, torch = _driver_and_build(case), case.torch
    if seen is None or torch is None or torch.cuda_available or not case.used_gpus:
        return
    if not _too_old(*seen) and all(g.fabric in ("none", "ready") for g in case.used_gpus):
        yield found("PF041", driver=seen[0], torch=torch.version)


def library_path(case: Case) -> Iterator[Finding]:
    """PF062: a CUDA toolkit on LD_LIBRARY_PATH."""
    if not case.ask.on_gpu or not case.stack.system.env.get("LD_LIBRARY_PATH"):
        return
    for path in case.stack.system.env["LD_LIBRARY_PATH"].split(":"):
        if "cuda" in path.lower() and "compat" not in path.lower():
            yield found("PF062", path=path)
            return


def _driver_and_build(case: Case) -> tuple[str, str] | None:
    nvidia, torch = case.stack.nvidia, case.torch
    if not case.ask.on_gpu or nvidia is None or nvidia.error or not nvidia.driver:
        return None
    if torch is None or torch.cuda is None:
        return None
    return nvidia.driver, torch.cuda


def _too_old(driver: str, build: str) -> bool:
    needs = tables.cuda().major_minimum.get(build.partition(".")[0])
    return needs is not None and below(driver, needs)


def _compat_wanted(case: Case) -> bool:
    env = case.stack.system.env
    asked = env.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "0").lower() in ("1", "true")
    return asked or "compat" in env.get("LD_LIBRARY_PATH", "")


def _compat_possible(driver: str, build: str) -> bool:
    branches = tables.cuda().forward_compatibility.get(build.partition(".")[0], ())
    return Version(driver).major in branches


def _too_old_finding(case: Case, driver: str, build: str, needs: str, offers: str) -> Finding:
    ways = ""
    if offers.startswith("12"):
        ways += f", or install a CUDA {offers} build ({_older_build(case)})"
    datacenter = bool(case.used_gpus) and all(gpu.datacenter for gpu in case.used_gpus)
    if datacenter and _compat_possible(driver, build):
        major, minor = build.split(".")[:2]
        ways += (
            f", or, on this data-centre GPU, install cuda-compat-{major}-{minor} "
            "(vLLM's image: VLLM_ENABLE_CUDA_COMPATIBILITY=1)"
        )
    return found("PF036", cuda=build, needs=needs, driver=driver, offers=offers, ways=ways)


def _older_build(case: Case) -> str:
    if case.ask.engine == "vllm":
        return "vLLM's cu129 wheels from wheels.vllm.ai, or vLLM 0.19.1, the last with CUDA 12"
    return "torch from https://download.pytorch.org/whl/cu129"


DRIVER_RULES = (new_enough,)
CUDA_RULES = (minor_compatibility, torch_sees_cuda, library_path)
