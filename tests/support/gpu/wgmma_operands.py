"""Find matrix products of a Hopper GPU whose left operand is overwritten while they read it.

Such a product (wgmma, in machine code HGMMA) runs concurrently with the instructions after it, until one waits for it.
If the left operand is in registers, ptxas before CUDA 13.3 reuses these registers too early if the wait leaves a later
product running (triton-lang/triton#9433).
"""

from __future__ import annotations

import re

_PREDICATE = re.compile(r"^@\S+\s+")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\S+ R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
_JUMP = re.compile(r"BRA\S* .*`\((\S+)\)")
_TARGET = re.compile(r"(?:!?U?P\w+, )?R(\d+)\b")
_OPERAND_REGISTERS = 4


def overwritten_operands(sass: str) -> list[str]:
    """Return each product whose operand is overwritten, as nvdisasm prints it, with the overwriting instruction."""
    code, labels = _parse(sass)
    found = []
    for start, product in enumerate(code):
        match = _PRODUCT.search(product)
        if match is None:
            continue
        first = int(match[2])
        operand = set(range(first, first + _OPERAND_REGISTERS))
        # Follow all paths from the product to the instruction that waits for its group or a later one.
        seen: set[tuple[int, int]] = set()
        ways = [(start, 0)]
        while ways:
            at, groups = ways.pop()
            if (at, groups) in seen or at == len(code):
                continue
            seen.add((at, groups))
            instruction = _PREDICATE.sub("", code[at])
            if operand & _written(instruction):
                found.append(f"{product} {code[at]}")
                break
            if "HGMMA" in instruction and "gsb0" in instruction:
                groups += 1
            wait = _WAIT.search(instruction)
            if wait is not None and groups > int(wait[1]):
                continue
            jump = _JUMP.search(instruction)
            if jump is not None:
                ways.append((labels[jump[1]], groups))
            if jump is None or instruction != code[at]:
                ways.append((at + 1, groups))
    return found


def _parse(sass: str) -> tuple[list[str], dict[str, int]]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in re.sub(r"/\*.*?\*/", "", sass).splitlines():
        stripped = line.strip()
        if stripped.endswith(":"):
            labels[stripped[:-1]] = len(code)
        elif stripped.endswith(";"):
            code.append(stripped)
    return code, labels


def _written(instruction: str) -> set[int]:
    """Return the registers that an instruction writes. Products never write another product's left operand."""
    name, _, operands = instruction.partition(" ")
    target = _TARGET.match(operands.strip())
    if target is None or name.startswith("HGMMA"):
        return set()
    count = 1
    if ".128" in name or (name.startswith("LDSM") and name.endswith(".4")):
        count = 4
    elif (
        ".64" in name
        or ".WIDE" in name
        or name == "CS2R"
        or (name.startswith("LDSM") and name.endswith(".2"))
    ):
        count = 2
    return set(range(int(target[1]), int(target[1]) + count))
