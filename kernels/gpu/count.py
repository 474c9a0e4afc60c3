#!/usr/bin/env python3
"""Counts the instructions that a lane issues for each value in the attention loops, in their disassembly.

    cargo xtask kernels                              # once: installs compiler and disassembler
    cargo xtask fused
    python3 kernels/gpu/count.py                     # sm_90, all presets of TURNS
    python3 kernels/gpu/count.py --sm 80 --sm 89
    python3 kernels/gpu/count.py --kernels ELSEWHERE # another version's folder of kernels

Nothing runs: it is a count, not a time. The path counted goes through the loop that has most products of
tensor cores, from its head back to it, past what KVD_RARELY marks and else straight on at every branch with
a condition. A loop within is so counted once. Values are of keys and values together."""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# By preset, channels of its heads and query rows: file, kernel, channels, and the most that a value may take.
# A turn of its loop is a stop, 64 tokens of keys and values: of a thread block, or where a warp owns tokens,
# of a warp.
FORMS = [(128, "_4", 1.75), (128, "_8", 2.55), (64, "_64_4", 2.2), (64, "_64_8", 3.4)]
TURNS = {f"kivi-{bits}/{channels}x{form[-1]}":
         ("attend_uniform_fixed", f"kvd_attend_kivi{bits}{form}", channels, most)
         for bits in (4, 2) for channels, form, most in FORMS}
PIPES = [
    ("tensor cores", ("HMMA", "IMMA", "MOVM")),
    ("halves and floats", ("HFMA2", "HMUL2", "HADD2", "FFMA", "FMUL", "FADD", "FMNMX", "FSETP", "F2FP")),
    ("logic and shifts", ("LOP3", "SHF", "PRMT", "SHL", "SHR")),
    ("shared memory", ("LDS", "STS", "LDSM", "LDGSTS", "SHFL")),
    ("global memory", ("LDG", "STG", "LD", "ST", "LDC", "ULDC")),
    ("special", ("MUFU", "F2F", "I2F", "F2I", "POPC")),
]
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
LABEL = re.compile(r"(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class Instruction:
    """One of a kernel: its operation, whether it has a condition, and the label it leads to."""

    def __init__(self, condition, operation, operands):
        self.operation = operation.split(".")[0]
        target = TARGET.search(operands)
        is_branch = self.operation == "BRA" and target
        self.target = target.group(1) if is_branch else None
        # A branch may have its condition behind its name too; one of lanes apart has none that meet.
        self.has_condition = (bool(condition) or bool(re.match(r"!?U?P[0-9]", operands))
                              or ".DIV" in operation)
        self.ends = self.operation in ("EXIT", "RET") and not condition


def find_tool(name):
    """The compiler or disassembler that `cargo xtask` has installed."""
    found = sorted(ROOT.glob(f"target/kernels/nvcc-*/lib/*/site-packages/nvidia/cu13/bin/{name}"))
    if not found:
        sys.exit(f"there is no {name} in target/kernels: `cargo xtask fused` installs it")
    return found[0]


def compile_kernels(folder, file, sm, out):
    """Compiles a file; gives the registers and bytes of spills of each kernel."""
    made = out / f"{file}.{sm}.cubin"
    command = [find_tool("nvcc"), "-std=c++17", "-O3", "-cubin", f"-arch=sm_{sm}", "-Xptxas", "-v",
               "-DKVD_MARK_RARE",
               "-I", folder / "include", folder / f"{file}.cu", "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    usages, kernel = {}, None
    for line in (done.stdout + done.stderr).splitlines():
        if "Compiling entry function" in line:
            kernel = line.split("'")[1]
        elif kernel and (spill := SPILL.search(line)):
            usages[kernel] = [None, int(spill.group(1)) + int(spill.group(2))]
        elif kernel in usages and (used := re.search(r"Used (\d+) registers", line)):
            usages[kernel][0] = int(used.group(1))
    return made, usages


def read_kernels(cubin):
    """The instructions of each kernel, and the places of its labels."""
    listing = subprocess.run([find_tool("nvdisasm"), "-c", cubin], capture_output=True, text=True,
                             check=True).stdout
    kernels, code, labels = {}, None, None
    for line in listing.splitlines():
        if line.startswith(".text."):
            code, labels = [], {}
            kernels[line[len(".text."):].rstrip(":")] = (code, labels)
        elif code is None:
            continue
        elif label := LABEL.match(line.strip()):
            labels[label.group(1)] = len(code)
        elif found := INSTRUCTION.search(line):
            code.append(Instruction(*found.groups()))
    return kernels


def is_rare(code, labels, at):
    """Whether what begins there is marked as rare before it branches."""
    for _ in range(len(code)):
        if at >= len(code) or code[at].operation == "PMTRIG":
            return at < len(code)
        if code[at].ends or (code[at].target and code[at].has_condition):
            return False
        at = labels.get(code[at].target, at + 1)
    return False


def walk(code, labels, head):
    """The path from a loop's head back to it, or nothing where it leads elsewhere."""
    path, at = [], head
    while at < len(code) and len(path) <= len(code):
        instruction = code[at]
        path.append(instruction)
        goes_back = instruction.target and labels.get(instruction.target) == head
        if goes_back:
            return path
        if instruction.ends:
            return []
        follows = instruction.target and (not instruction.has_condition
                                          or is_rare(code, labels, at + 1))
        at = labels.get(instruction.target, len(code)) if follows else at + 1
    return []


def count_products(path):
    return sum(instruction.operation.endswith("MMA") for instruction in path)


def find_loop(code, labels):
    """The path through the loop with most products; of one around another the inner."""
    heads = {labels[instruction.target] for at, instruction in enumerate(code)
             if instruction.target in labels and labels[instruction.target] <= at}
    return max((walk(code, labels, head) for head in heads),
               key=lambda path: (count_products(path), -len(path)), default=[])


def describe(path, values):
    """Counts by kind of instruction, for a value."""
    words, left = [], len(path)
    for name, operations in PIPES:
        count = sum(instruction.operation in operations for instruction in path)
        left -= count
        words.append(f"{name} {count / values:.2f}")
    return ", ".join([*words, f"others {left / values:.2f}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sm", type=int, action="append", help="compute capability, 90 if none is named")
    parser.add_argument("--kernels", type=pathlib.Path, default=ROOT / "kernels")
    parser.add_argument("--preset", action="append", choices=TURNS)
    parser.add_argument("--check", action="store_true", help="fails where a value takes too many, or a spill")
    asked = parser.parse_args()
    bad = []
    with tempfile.TemporaryDirectory() as out:
        for sm in asked.sm or [90]:
            kept = {}
            for preset in asked.preset or TURNS:
                file, kernel, channels, most = TURNS[preset]
                if file not in kept:
                    made, usages = compile_kernels(asked.kernels, file, sm, pathlib.Path(out))
                    kept[file] = (read_kernels(made), usages)
                kernels, usages = kept[file]
                path = find_loop(*kernels[kernel])
                if not path:
                    sys.exit(f"no loop with products was found in {kernel}")
                # A warp that owns tokens meets no others in its loop.
                is_shared = any(instruction.operation == "BAR" for instruction in path)
                values = 64 * 2 * channels // (128 if is_shared else 32)
                registers, spilled = usages[kernel]
                print(f"{preset} sm_{sm}: {len(path) / values:.2f} instructions a value ({len(path)} for "
                      f"{values}), {registers} registers, {spilled} bytes spilled")
                print(f"  {describe(path, values)}")
                if asked.check and (len(path) / values > most or spilled):
                    bad.append(f"{preset} sm_{sm}")
    if bad:
        sys.exit(f"too many instructions a value, or spills: {', '.join(bad)}")


if __name__ == "__main__":
    main()
