"""The program `leadout`, also `python -m leadout` where it is not on the path: the command line, once it is loaded."""

import sys


def main() -> None:
    """Run it. Ctrl-C before there is anything that could be undone ends in silence, with the code of a later one."""
    try:
        from .scripts.cli import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line(prog_name="leadout")


if __name__ == "__main__":
    main()
