"""``optimum-cli export leadout``: the same exporter inside optimum's command line (which imports this at start)."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ..errors import LeadoutError, not_installed, one_line, require_docstrings
from .drafts.choice import PRECISIONS, number_or_word


class LeadoutExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum ships no types
    """Options are those of ``leadout export``; the target is --model, as in optimum's other exporters."""

    COMMAND = CommandInfo(name="leadout", help="Export a target and a draft model to a Leadout bundle.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Declare the options; optimum calls this when it builds its parser."""
        parser.add_argument("-m", "--model", required=True, help="The target: a checkpoint directory or hub id.")
        parser.add_argument("--draft", help="The draft: a directory or hub id (a model or head), mtp, or self.")
        parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="Of the target's weights.")
        parser.add_argument(
            "--draft-precision",
            choices=PRECISIONS,
            help="Of the draft's. Default: int4 (int8, if it says drafts in one step); fp16 beside fp16.",
        )
        parser.add_argument("--draft-vocabulary", help="Its N likeliest tokens alone, or the ids in this file.")
        parser.add_argument("--calibration", action="append", default=[], help="A text that says which are likely.")
        parser.add_argument("--mask-token", help="The draft's token that asks for a whole draft in one step, or none.")
        parser.add_argument("--max-context", type=int, help="Positions to allow. Default: the model's own.")
        parser.add_argument("output", type=Path, help="Where to write the bundle.")

    def run(self) -> None:
        """Export. What Leadout refuses ends the process with one line on stderr and Leadout's exit code; SIGTERM ends
        it with what is half written removed."""
        before = signal.signal(signal.SIGTERM, _end)
        try:
            print(self._export())
        except ImportError as error:
            self._refuse(not_installed(error))
        except LeadoutError as error:
            self._refuse(error)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _export(self) -> Path:
        require_docstrings()
        from .build import export_pair

        args = self.args
        return export_pair(
            args.model,
            args.draft,
            args.output,
            precision=args.precision,
            draft_precision=args.draft_precision,
            draft_vocabulary=number_or_word(args.draft_vocabulary),
            calibration=args.calibration,
            mask_token=number_or_word(args.mask_token),
            max_context=args.max_context,
            progress=lambda line: print(line, file=sys.stderr),
        )

    def _refuse(self, error: LeadoutError) -> None:
        self.parser.exit(error.exit_code, f"{self.parser.prog}: {one_line(error)}\n")


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # what it ends must come to its end
    sys.exit(128 + number)
