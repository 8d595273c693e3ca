"""A llama.cpp server in a process of its own, which ends with its owner: when its standard input is closed.

    python -P llamacpp_server.py PROGRAM FLAG...

PROGRAM is the path of a ``llama-server`` binary, or ``xllamacpp`` for that package's server, which then takes the same
flags, as far as they are known here. Nothing of choicespec is imported.
"""

import argparse
import subprocess
import sys
import threading
import time
from typing import Any

PACKAGE = "xllamacpp"
_LOG_S = 0.5
_SPECULATION_TYPES = {
    "ngram-simple": "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE",
    "draft-simple": "COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE",
    "draft-mtp": "COMMON_SPECULATIVE_TYPE_DRAFT_MTP",
    "draft-dflash": "COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH",
}


def main() -> int:
    """Serve until standard input is closed or the server ends by itself."""
    program, *flags = sys.argv[1:]
    if program != PACKAGE:
        return _run_binary([program, *flags])
    import xllamacpp

    try:
        server = xllamacpp.Server(read_parameters(xllamacpp, flags))  # serves from threads of its own
    except RuntimeError:
        time.sleep(_LOG_S)  # why is in its log, which a thread of its own writes, and which nothing here can flush
        return 1
    sys.stdin.buffer.read()
    del server
    return 0


def _run_binary(command: list[str]) -> int:
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:

        def end_with_owner() -> None:
            sys.stdin.buffer.read()
            server.terminate()

        threading.Thread(target=end_with_owner, daemon=True).start()
        return server.wait()


def read_parameters(xllamacpp: Any, flags: list[str]) -> Any:
    """The package's parameters for a server with these flags."""
    asked = _parse(flags)
    found = xllamacpp.CommonParams()
    found.model.path = asked.model
    found.hostnames, found.port = [asked.host], asked.port
    found.n_ctx, found.n_parallel = asked.ctx_size, asked.parallel
    found.cpuparams.n_threads, found.cpuparams_batch.n_threads = asked.threads, asked.threads_batch
    found.cache_ram_mib = asked.cache_ram
    found.fit_params = asked.fit == "on"
    found.ui = False
    if asked.spec_type is not None:
        speculative = found.speculative
        speculative.types = [getattr(xllamacpp.common_speculative_type, _SPECULATION_TYPES[asked.spec_type])]
        speculative.ngram_simple.size_n = asked.spec_ngram_simple_size_n
        speculative.ngram_simple.size_m = asked.spec_ngram_simple_size_m
        speculative.draft.mparams.path = asked.spec_draft_model
        speculative.draft.n_max, speculative.draft.p_min = asked.spec_draft_n_max, asked.spec_draft_p_min
        speculative.draft.cpuparams.n_threads = asked.threads
        speculative.draft.cpuparams_batch.n_threads = asked.threads_batch
        found.load_mtp = asked.spec_type == "draft-mtp"  # as the binary does
    return found


def _parse(flags: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PACKAGE, allow_abbrev=False)
    for name in ("--model", "--host", "--fit"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--ctx-size", "--parallel", "--threads", "--threads-batch", "--cache-ram"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--spec-type", choices=_SPECULATION_TYPES)
    parser.add_argument("--spec-draft-model", default="")
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    for name in ("--spec-draft-n-max", "--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"):
        parser.add_argument(name, type=int, default=1)
    return parser.parse_args(flags)


if __name__ == "__main__":
    sys.exit(main())
