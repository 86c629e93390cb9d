"""Vision towers that are more than a few fields of Qwen-VL's."""
