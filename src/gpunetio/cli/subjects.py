"""A group whose help lists the commands by subject."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from .failures import OneLineUsage

_INDENT = _GAP = 2  # around the names: `click.HelpFormatter`


class Subjects(OneLineUsage):
    """A group of commands whose help lists them by subject, in the order of `add_subject`, as wide as the terminal."""

    def __init__(self, *arguments: Any, **settings: Any):
        # Without a limit, click writes at most 80 columns.
        settings["context_settings"] = {"max_content_width": sys.maxsize, **settings.get("context_settings", {})}
        super().__init__(*arguments, **settings)
        self.subjects: dict[str, list[str]] = {}

    def add_subject(self, title: str, commands: Mapping[click.Command, str | None]) -> None:
        """Add commands under a title. A text replaces the first sentence of the command's help in the list."""
        for command, text in commands.items():
            command.short_help = text or command.short_help
            self.add_command(command)
        self.subjects[title] = [command.name for command in commands if command.name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list for each subject. The texts of all lists begin in the same column."""
        longest = max(map(len, self.commands))
        room = formatter.width - _INDENT - longest - _GAP
        for title, names in self.subjects.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(longest), self.commands[name].get_short_help_str(room)) for name in names],
                    col_spacing=_GAP,
                )
