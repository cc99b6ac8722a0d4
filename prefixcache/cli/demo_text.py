"""What the demo's workers are asked: chapters of Python's own reference as a system prompt, and questions about them.

Real text that every Python brings along. It must not know workers or the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARED_TOKENS: Final = 2000
MAX_OWN_TOKENS: Final = 100

_CHAPTERS: Final = ("with", "try", "context-managers", "async", "naming", "import")
_WARM_UP_CHAPTERS: Final = ("formatstrings", "class")

QUESTIONS: Final = (
    "What does the with statement do?",
    "When is the else clause of a try statement executed?",
    "How do I open two files in one with statement? Please answer with a short example and one sentence about the "
    "order in which they are closed.",
    "What is the difference between except and finally?",
    "Explain what __exit__ may return, and what happens to an exception then.",
    "I have a lock that must be released whatever happens in the block that it protects. Which statement should I use, "
    "and why is it better than calling release at the end?",
    "Can a coroutine use an ordinary context manager?",
    "What is an except* clause good for?",
    "How are names resolved in a nested function?",
    "In one sentence: what is a traceback?",
    "Which exceptions does a bare except clause catch? Is that a good idea in a library that others build on?",
    "Name one context manager of the standard library.",
)


@dataclass(frozen=True)
class Prompt:
    """A question and the token ids of the whole prompt; the first `shared` of them are the system prompt's."""

    question: str
    ids: list[int]
    shared: int


def make_prompts(checkpoint: Path, count: int) -> list[Prompt]:
    """`count` prompts that share their first SHARED_TOKENS tokens and have at most MAX_OWN_TOKENS of their own."""
    tokenizer = _tokenizer(checkpoint)
    shared = _system_prompt(tokenizer, _CHAPTERS)
    return [_prompt(tokenizer, shared, QUESTIONS[i % len(QUESTIONS)], i // len(QUESTIONS)) for i in range(count)]


def make_warm_up(checkpoint: Path) -> Prompt:
    """A prompt of the same size that shares nothing with the others, for the first, slow request of a process."""
    tokenizer = _tokenizer(checkpoint)
    return _prompt(tokenizer, _system_prompt(tokenizer, _WARM_UP_CHAPTERS), "What is this about?", 0)


def decode(checkpoint: Path, ids: list[int]) -> str:
    """Token ids as text, without special tokens."""
    text: str = _tokenizer(checkpoint).decode(ids)
    return text


def _tokenizer(checkpoint: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def _system_prompt(tokenizer: Tokenizer, chapters: tuple[str, ...]) -> list[int]:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in chapters if name in topics)
    ids: list[int] = tokenizer.encode(f"<|im_start|>system\nAnswer from this reference.\n\n{text}").ids
    return ids[:SHARED_TOKENS]


def _prompt(tokenizer: Tokenizer, shared: list[int], question: str, turn: int) -> Prompt:
    asked = f"{question} (Attempt {turn + 1}.)" if turn else question
    own: list[int] = tokenizer.encode(f"<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n").ids
    return Prompt(asked, shared + own[:MAX_OWN_TOKENS], len(shared))
