"""Print the packages that Engine and some of its extras need, one a line: scripts/requirements.py [extra ...]."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
requirements, extras = project["dependencies"], sys.argv[1:]
# An extra may include others of the project.
for extra in extras:
    for requirement in project["optional-dependencies"][extra]:
        if own := re.fullmatch(rf"{project['name']}\[(.+)\]", requirement):
            extras += own[1].split(",")
        else:
            requirements.append(requirement)
print("\n".join(dict.fromkeys(requirements)))
