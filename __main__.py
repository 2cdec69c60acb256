"""The program `leadout`, also `python -m leadout` where it is not on the path: the command line, once it is loaded."""

import signal
import sys


def main() -> None:
    """Run it. Ctrl-C before there is anything that could be undone ends in silence, with the code of a later one; when
    the command is over, it ends the process at once, as SIGTERM does, unless the process was begun to ignore it."""
    try:
        from .scripts.cli import main as command_line

        command_line(prog_name="leadout")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
