"""Chat templates for models that are published without one.

Markers are those that the models were trained with; the explanation of tools is ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .messages import MEDIA_MARK

_DIRECTORY: Final = Path(__file__).with_name("templates")

_CONTENTS: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"

# The text of messages is left out. A template that does not show it gets the marks of images in strings.
_IMAGES: Final = f"""
{{%- set text = messages | map(attribute="content") | join %}}
{{{{- text | select("equalto", "{MEDIA_MARK}") | join or raise_exception("send an image, whose text is read") }}}}
"""

# A caption continues the text, which follows the image.
_CAPTIONS: Final = f"""
{{%- set text = messages | map(attribute="content") | join %}}
{{{{- text | select("equalto", "{MEDIA_MARK}") | join or raise_exception("send an image, which is described") }}}}
{{{{- text | replace("{MEDIA_MARK}", " ") | trim }}}}
"""

_SHORT: Final = {
    "blip": _CAPTIONS.strip(),
    **dict.fromkeys(
        ("clip", "clip_text_model", "openvla", "siglip", "siglip_text_model"), _CONTENTS
    ),
    **dict.fromkeys(
        ("deepseek_ocr", "deepseek_ocr2", "kosmos-2", "unlimited_ocr"),
        "{{ bos_token }}" + _CONTENTS,
    ),
    "git": _CAPTIONS.strip(),
    "instructblip": _CAPTIONS.strip(),
    "pix2struct": _CAPTIONS.strip(),
    **dict.fromkeys(("nougat", "pp_formulanet", "trocr"), _IMAGES.strip()),
}
"""Model type -> the template."""

_FILES: Final = {
    **{name: (name,) for name in ("chameleon", "deepseek_vl_v2", "kimi_k3")},
    **{name: (name, "deepseek_turns") for name in ("deepseek_v4", "deepseek_v41")},
    **{
        name: ("image_parts", name)
        for name in ("donut", "florence2", "moondream", "nemotron_parse")
    },
}
"""Model type -> the files whose contents, one after the other, are the template."""


def built_in_template(model_type: str) -> str | None:
    """Return the template for models of a type; None if there is none."""
    if (files := _FILES.get(model_type)) is None:
        return _SHORT.get(model_type)
    texts = ((_DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8") for name in files)
    return "\n".join(texts).strip()
