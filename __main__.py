"""`python -m leadout`: the command line, where the program `leadout` is not on the path."""

from .scripts.cli import main

if __name__ == "__main__":
    main(prog_name="leadout")
