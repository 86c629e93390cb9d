"""The annotation that turns a configuration field into an option of the command line."""

from typing import Any

import msgspec


class OptionSpec(msgspec.Struct, frozen=True):
    """One option of `engine serve`. The type and the default are those of the field that it annotates.

    Attributes:
        help: The effect of the option, in at most 12 words.
        aliases: More flags for it, separated by spaces: short ones, and the names that other servers use.
        name: The flag, if it is not the field's name with dashes and without the unit `_s`.
        group: The heading in help, if it is not that of the section.
        metavar: The placeholder for the value in help.
        default_text: Replaces the default in help where the field's own default would mislead.
        on_cpu: The default on a machine without a GPU.
        choices: The permitted values of a string field. An enum or a Literal needs none here.
        synonyms: Accepted spelling -> the value that it stands for.
        parse: The name of a parser in `frontend/cli/option_values.py` for a syntax that the type does not imply.
        value: The value that the flag sets. A flag with it takes no argument.
        entries: Flag -> the entry of the field, an object, that it sets. The flag's value is JSON, or `auto`.
        variable: Environment variables that are read if the option's own is not set, separated by spaces.
    """

    help: str
    aliases: str = ""
    name: str = ""
    group: str = ""
    metavar: str = ""
    default_text: str = ""
    on_cpu: object = None
    choices: tuple[str, ...] = ()
    synonyms: dict[str, str] = {}
    parse: str = ""
    value: object = None
    entries: dict[str, str] = {}
    variable: str = ""


def option(
    help: str,
    aliases: str = "",
    *,
    ge: float | None = None,
    le: float | None = None,
    **details: Any,
) -> msgspec.Meta:
    """Return the annotation that makes a field an option.

    An example is `Annotated[int, option("Tokens per block", ge=1)]`. A field with several annotations has several
    options; the first is its own.

    Args:
        help: See `OptionSpec`.
        aliases: See `OptionSpec`.
        ge: The lowest value. Decoding a configuration checks it as well.
        le: The highest value.
        **details: The other attributes of `OptionSpec`.
    """
    return msgspec.Meta(ge=ge, le=le, extra={"option": OptionSpec(help, aliases, **details)})
