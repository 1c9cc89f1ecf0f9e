"""A vision-language-action policy in the style of OpenVLA (arXiv 2406.09246). Importing this module loads torch."""

from rlinf_embodied.policies.vla.policy import VlaPolicy

REQUIRES = {"transformers": "vla", "safetensors": "vla", "tokenizers": "vla"}

__all__ = ["VlaPolicy"]
