"""The special tokens of models that read images, by their kinds."""

from __future__ import annotations

INTERNVL_MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
    "nvlm_token": "<|vision_pad|>",
}
MARKS = ["<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)
]
MODELS = ("idefics3", "smolvlm", "llava-clip", "llava-siglip", "internvl", "aya_vision")
GEMMA_MODELS = ("gemma3", "gemma4", "gemma4_unified", "paligemma", "paligemma2")
SIZED_MODELS = ("pixtral", "mistral3", "lighton_ocr", "mistral_large4")
ANYRES_MODELS = ("llava_next", "llava_onevision", "granite4_vision")
LLAMA4_MARKS = {
    "image": "<|image|>",
    "patch": "<|patch|>",
    "start_of_image": "<|image_start|>",
    "end_of_image": "<|image_end|>",
    "tile_x_separator": "<|tile_x_separator|>",
    "tile_y_separator": "<|tile_y_separator|>",
}
COHERE_MARKS = {
    "boi": "<|START_OF_IMG|>",
    "eoi": "<|END_OF_IMG|>",
    "image": "<|IMG_PATCH|>",
    "img_line_break": "<|IMG_LINE_BREAK|>",
}
GEMMA_MARKS = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image>"}


def image_mark(kind: str) -> str:
    """Return the token that represents an image."""
    marks = {
        "internvl": "<IMG_CONTEXT>",
        "qianfan_ocr": "<IMG_CONTEXT>",
        "gemma3": "<start_of_image>",
    }
    marks["internvl_chat"] = "<image>"
    marks["cohere2_vision"] = COHERE_MARKS["image"]
    marks |= dict.fromkeys(SIZED_MODELS, "[IMG]") | {"llama4": LLAMA4_MARKS["image"]}
    return marks.get(kind.split("-")[0], "<image>")


def family_marks(kind: str) -> list[str]:
    if kind.startswith(("internvl", "qianfan")):
        return [*MARKS, *INTERNVL_MARKS.values()]
    if kind == "llama4":
        return [*MARKS, *LLAMA4_MARKS.values()]
    if kind in ("aya_vision", "cohere2_vision"):
        return [*MARKS, *COHERE_MARKS.values()]
    if kind == "llava_onevision":
        return [*MARKS, "<video>"]
    if kind in SIZED_MODELS:
        return [*MARKS, "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    return [*MARKS, *GEMMA_MARKS.values(), "<video>"] if kind in GEMMA_MODELS else MARKS
