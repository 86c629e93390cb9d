"""The supported model families: from a Hugging Face config to a `ModelSpec`.

`registry` lists them; each other module has those of one lineage, as functions from config fields to a spec.
"""

from .registry import UnknownArchitecture, model_spec

__all__ = ["UnknownArchitecture", "model_spec"]
