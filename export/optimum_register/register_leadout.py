"""Installed as ``optimum/commands/register/register_leadout.py``, where optimum-cli looks for commands (PEP 420)."""

from optimum.commands.export.base import ExportCommand

from leadout.export.optimum_command import LeadoutExportCommand

REGISTER_COMMANDS = [(LeadoutExportCommand, ExportCommand)]
