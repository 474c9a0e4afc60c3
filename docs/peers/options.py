"""Options of peers.py: counts of at least one, and programs that are there."""

import argparse
import shutil


def at_least_one(text):
    """A count of something, for argparse."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is wanted")
    return count


def some_bytes(text):
    """A size of caches, for argparse."""
    size = float(text)
    if not 1 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: at least one byte is wanted, and no more than there are")
    return size


def executable(text):
    """A program that can be run, for argparse."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"{text}: no such program; README.md says how to build it")
    return text


def parsed(description):
    """What peers.py was asked for; what cannot be done is refused here."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kvd", type=executable, default="target/release/kvd", help="a release build")
    parser.add_argument("--context", type=at_least_one, default=8192, help="cached tokens")
    parser.add_argument("--turns", type=at_least_one, default=5)
    parser.add_argument("--buffer", type=some_bytes, default=128e6, help="bytes of caches")
    parser.add_argument("--codec", action="append", help="a preset or spec; may be repeated")
    parser.add_argument(
        "--block-tokens", type=at_least_one, action="append", help="of kvd; may be repeated [64]"
    )
    parser.add_argument("--ggml", action="append", help="NAME=PROGRAM of ggml.cpp; may be repeated")
    parser.add_argument("--huff0", type=executable, help="the program of huff0.c")
    parser.add_argument(
        "--version-of",
        action="append",
        metavar="NAME=TEXT",
        help="what a NAME of --ggml, or huff0, was built from, to be printed; may be repeated",
    )
    parser.add_argument("--avx2", action="store_true", help="no wider vectors; programs built so")
    parser.add_argument("--instruction-set", help="that of kvd with --avx2 [avx2]")
    parser.add_argument("--no-scaling", action="store_true", help="without two threads and contexts")
    arguments = parser.parse_args()
    if arguments.instruction_set and not arguments.avx2:
        parser.error("--instruction-set is for --avx2")
    for given in [*(arguments.ggml or []), *(arguments.version_of or [])]:
        if "=" not in given:
            parser.error(f"{given}: NAME=… is wanted")
    for given in arguments.ggml or []:
        try:
            executable(given.split("=", 1)[1])
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --ggml: {error}")
    return arguments
