"""Patterns that split texts into words, shared by statistics and models."""

import re

#: Punctuation that Keras's TextVectorization strips by default.
PUNCTUATION = r"[!\"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~']"
#: Letters of scripts without spaces: Thai, Lao, Burmese, Khmer, kana, Chinese.
LETTERS = (
    ("\u0e00", "\u0eff"), ("\u1000", "\u109f"), ("\u1780", "\u17ff"), ("\u3040", "\u30ff"),
    ("\u3400", "\u9fff"), ("\uf900", "\ufaff"), ("\U00020000", "\U0003ffff"),
)  # fmt: skip
LETTER = f"([{''.join(f'{first}-{last}' for first, last in LETTERS)}])"


def is_letter(text: str) -> bool:
    """Return whether a text begins with a letter of a script without spaces."""
    return bool(re.match(LETTER, text))
