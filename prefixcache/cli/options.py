"""Options that several commands take: which namespace is meant, and how a prompt in a file becomes keys.

Rules: declarations only, nothing heavy is imported.
"""

from pathlib import Path
from typing import Annotated

import typer

NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Label, or beginning of the fingerprint. Default: the only one there is."),
]
PromptFile = Annotated[str, typer.Argument(help="Token file, or text with --tokenizer; - for standard input.")]
TokenizerOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Read FILE as text and tokenize it with this tokenizer.")
]
SaltOption = Annotated[str, typer.Option(help="Salt the prompt was cached with.", show_default=False)]
TenantKeyOption = Annotated[Path | None, typer.Option(metavar="FILE", help="The tenant's 32-byte key.")]
FirstTokensOption = Annotated[
    int | None, typer.Option("--tokens", metavar="N", min=1, help="Only the first N tokens of FILE.")
]
