"""The end of writing a GGUF file."""

from pathlib import Path

from gguf import GGUFWriter


def finish(writer: GGUFWriter) -> Path:
    """Write all that was added to a file, close it, and return its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert writer.path is not None
    return writer.path
