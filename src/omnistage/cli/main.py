"""The command `omnistage`: finds the subcommand, runs it, turns failures into one line."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from omnistage import __version__
from omnistage.cli import exits
from omnistage.cli.parsing import CommandParser, parse_arguments
from omnistage.config.checks import suggestion
from omnistage.contracts.errors import ConfigurationError, OmniError

TRACEBACK_VARIABLE = "OMNISTAGE_TRACEBACK"

COMMANDS = {
    "serve": "start the OpenAI-compatible server for a model",
    "generate": "make a picture from a prompt and write it to a file",
    "plan": "show the resolved configuration and what would be loaded, without loading",
    "doctor": "show what is installed, which devices work and what is missing",
    "demo": "serve the bundled model, ask it for one picture, show how to go on",
    "bench": "measure a server: requests a second and latencies",
    "cache": "look at, verify and prune the cache of streamed weights",
}

_USAGE = """\
usage: omnistage COMMAND [flags]

Serves any-to-any models: pipelines of stages behind an OpenAI-compatible server.

commands:
{commands}

  omnistage COMMAND --help    the flags of a command
  omnistage --version         the version

start here:  omnistage demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 failed, 2 refused, 130 interrupted."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except exits.Exit as ending:
        return ending.code
    except OmniError as error:
        return _report(error, error.message, exits.REFUSED)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILURE
    except Exception as error:
        hint = f"internal error, {type(error).__name__}: {error}; {TRACEBACK_VARIABLE}=1 shows more"
        return _report(error, hint, exits.FAILURE)


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if name in ("-V", "--version"):
        print(f"omnistage {__version__}")
        return 0
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        raise ConfigurationError(f"unknown {kind} {name!r}; {suggestion(name, COMMANDS)}")
    command = importlib.import_module(f"omnistage.cli.{name}")
    parser = CommandParser(prog=f"omnistage {name}", description=command.__doc__)
    command.add_arguments(parser)
    return int(command.run(parse_arguments(parser, argv[1:])))


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {meaning}" for name, meaning in COMMANDS.items())
    return _USAGE.format(commands="\n".join(lines))


def _report(error: BaseException, message: str, code: int) -> int:
    """One line on standard error; the traceback only for those who ask for it."""
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
        detail = getattr(error, "detail", None)
        if detail:
            print(detail, file=sys.stderr)
    print(f"omnistage: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
