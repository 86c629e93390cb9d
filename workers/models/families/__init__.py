"""The supported model families: functions from a Hugging Face config to a `ModelSpec`.

`registry` lists all families. Every other module contains the families of one lineage.
"""

from .registry import UnknownArchitecture, model_spec

__all__ = ["UnknownArchitecture", "model_spec"]
