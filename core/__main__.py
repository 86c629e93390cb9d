"""`python -m engine.core CONFIG CORE_INDEX`: one engine-core process."""

from __future__ import annotations

import logging
import sys

from ..protocol.config import load_config
from ..protocol.errors import EngineError
from ..protocol.messages import Stage
from ..protocol.process import configure_logging, die_with_parent, name_process
from .engine_core import EngineCore


def main(config_path: str, core_index: int) -> int:
    config = load_config(config_path)
    name = f"core {core_index}"
    name_process(name)
    configure_logging(name, config.frontend.log_level)
    die_with_parent(config.run_dir)
    core = EngineCore(config, core_index)
    try:
        core.run()
    except EngineError as error:
        core.report(Stage.FAILED, str(error))
        return 1
    except Exception as error:
        logging.getLogger(__name__).exception("unexpected error")
        core.report(Stage.FAILED, f"{type(error).__name__}: {error}")
        return 1
    finally:
        core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
