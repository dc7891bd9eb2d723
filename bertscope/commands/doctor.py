"""`bertscope doctor`."""

from bertscope.commands.output import OutputOptions
from bertscope.commands.registry import command

EXAMPLES = """
  bertscope doctor
  bertscope doctor --format json
  bertscope doctor --format markdown --output environment.md
"""


@command(examples=EXAMPLES)
def doctor(*, out: OutputOptions) -> None:
    """Show the environment: versions, devices, extras found and missing, the folder of presets.

    It also works if torch is missing or broken, and exits 0.
    """
    from bertscope.analyses.doctor import doctor as analyse

    out.show(analyse())
