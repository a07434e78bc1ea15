"""Launch: commands, manifests and supervision of vLLM, SGLang, TensorRT-LLM and Transformers."""

from hullspeed.launch.check import Checked, check_text
from hullspeed.launch.command import Command, build_command
from hullspeed.launch.settings import Settings

__all__ = ["Checked", "Command", "Settings", "build_command", "check_text"]
